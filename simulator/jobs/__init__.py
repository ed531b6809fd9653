"""Simulator: jobs."""
