"""Simulator: engine."""
