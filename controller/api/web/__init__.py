"""Controller: api: web."""
