"""Trainer: distributed."""
