"""Predictor: imbalance."""
