"""Cli: doctor."""
