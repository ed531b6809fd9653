"""Cli: analysis."""
