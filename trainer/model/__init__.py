"""Trainer: model."""
