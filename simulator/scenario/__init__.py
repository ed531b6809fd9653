"""Loads and checks a simulation's TOML file: cluster, failures, job and policies."""
