"""Controller: detection."""
