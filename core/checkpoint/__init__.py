"""Core: checkpoint."""
