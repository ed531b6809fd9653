"""Detects a job that slows as a whole, from its step times, live or recorded."""
