"""Plays one job under one policy through one failure history, and sums up where time went."""
