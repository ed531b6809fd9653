"""Trainer: elastic."""
