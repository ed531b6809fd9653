"""Predictor: causes."""
