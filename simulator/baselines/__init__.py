"""Planners of published systems, as baselines: EPLB, Lazarus, Malleus, Greyhound, ResiHP. Pure."""
