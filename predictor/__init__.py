"""Predicts step times, detects slow ranks and explains them. Pure functions of plain values.

`cost` predicts the compute time of a micro-batch and of a layout; `online` runs the detector of
live jobs, `offline` that of recorded runs, `job_level` detects a job that slows as a whole;
`causes` attributes a finding; `imbalance` prices uneven work; `assurance` states and tests what
can be detected; `stats` holds the statistics they share.
"""
