"""The HTTP/2 server of the ingest process: agents' streams, and a proxy for other calls."""
