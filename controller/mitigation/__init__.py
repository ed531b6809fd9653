"""Controller: mitigation."""
