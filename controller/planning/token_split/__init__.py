"""Controller: planning: token split."""
