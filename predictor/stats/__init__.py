"""Predictor: stats."""
