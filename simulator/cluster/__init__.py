"""Simulator: cluster."""
