"""Controller: policy."""
