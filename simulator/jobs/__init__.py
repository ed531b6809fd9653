"""Simulated jobs: sizes, step times, recorded expert loads and document lengths."""
