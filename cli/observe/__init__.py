"""Cli: observe."""
