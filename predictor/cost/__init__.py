"""Predictor: cost."""
