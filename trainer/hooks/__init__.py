"""Trainer: hooks."""
