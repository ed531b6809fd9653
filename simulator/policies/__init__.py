"""Simulator: policies."""
