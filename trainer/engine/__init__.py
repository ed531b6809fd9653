"""Trainer: engine."""
