"""Controller: planning: partition."""
