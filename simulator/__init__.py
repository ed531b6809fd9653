"""Simulated clusters and recorded runs.

`readers` turn recorded runs of many tools into one trace; `scenario` loads a simulation's
settings, `cluster` its failures, `jobs` its workload; `engine` plays a job under one of
`policies`, some of which use `baselines`, the planners of published systems.
"""
