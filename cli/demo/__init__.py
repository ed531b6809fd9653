"""Cli: demo."""
