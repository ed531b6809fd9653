"""Simulator: policies: pipeline."""
