"""Statistics of the detectors: robust estimates, change points, CUSUM thresholds, peers.

Functions of numpy arrays that know neither ranks' work nor findings.
"""
