"""Cli: top."""
