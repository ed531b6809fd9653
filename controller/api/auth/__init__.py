"""Controller: api: auth."""
