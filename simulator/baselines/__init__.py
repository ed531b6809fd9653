"""Simulator: baselines."""
