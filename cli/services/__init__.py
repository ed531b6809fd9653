"""Cli: services."""
