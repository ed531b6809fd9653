"""Predicts step times, detects slow ranks and explains them. Pure functions of plain values.

`cost` predicts the compute time of a micro-batch and of a layout; `detector` detects slow ranks
of live jobs, `recorded` analyses recorded runs, `job_level` detects a job that slows as a whole;
`causes` attributes a finding; `imbalance` prices uneven work; `assurance` states and tests what
can be detected; `stats` holds the statistics they share.
"""
