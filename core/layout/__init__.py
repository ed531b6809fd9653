"""Core: layout."""
