"""Controller: ha."""
