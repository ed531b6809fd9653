"""Controller: ingest: http2."""
