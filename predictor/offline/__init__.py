"""Predictor: offline."""
