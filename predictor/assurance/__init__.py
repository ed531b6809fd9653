"""Predictor: assurance."""
