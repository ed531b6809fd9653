"""Cli: planning."""
