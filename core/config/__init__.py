"""Core: config."""
