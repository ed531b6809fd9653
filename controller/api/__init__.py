"""Controller: api."""
