"""Controller: planning: partition cost."""
