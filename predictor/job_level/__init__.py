"""Predictor: job level."""
