"""Detects a job that slows as a whole, from its step times, live or recorded.

In: step durations, with tokens and squared lengths if known. Out: findings without a rank.
`detect` judges recorded runs, `online` live ones by the same rules; `global_slowdown` judges all
ranks, or all of a stage, of a trace with compute times.
"""
