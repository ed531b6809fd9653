"""Core: incidents."""
