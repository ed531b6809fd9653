"""Cli: common."""
