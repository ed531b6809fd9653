"""Controller: ingest."""
