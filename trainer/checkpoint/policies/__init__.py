"""Trainer: checkpoint: policies."""
