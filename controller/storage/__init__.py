"""The controller's SQLite store: schema, rows, retention, and the log of committed changes."""
