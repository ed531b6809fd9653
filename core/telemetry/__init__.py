"""Core: telemetry."""
