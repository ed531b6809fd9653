"""Controller: storage."""
