"""Trainer: parallel."""
