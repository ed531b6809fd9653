"""Trainer: checkpoint."""
