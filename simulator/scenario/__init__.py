"""Simulator: scenario."""
