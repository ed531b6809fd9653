"""Receives agents' reports in a process of its own and passes them on as packed frames."""
