"""Trainer: adapters: instrumentation."""
