"""Cli: operate."""
