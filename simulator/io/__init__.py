"""Simulator: io."""
