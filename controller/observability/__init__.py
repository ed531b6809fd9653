"""Controller: observability."""
