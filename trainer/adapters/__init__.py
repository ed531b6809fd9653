"""Trainer: adapters."""
