"""Statistics of the detectors: robust estimates, change points, CUSUM thresholds, peers.

Functions of numpy arrays without knowledge of work or findings.
"""
