"""One script per claim: `python -m benchmarks.NAME`. A table for people, then one line of JSON."""
