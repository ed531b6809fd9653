"""Controller: planning."""
