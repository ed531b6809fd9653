"""Simulator: readers."""
