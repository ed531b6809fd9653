"""Controller: planning: experts."""
