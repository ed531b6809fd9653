"""Cli: admin."""
