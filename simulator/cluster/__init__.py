"""Failures of a simulated cluster: recorded or generated faults, nodes that come and go."""
