"""Predictor: online."""
