"""Statistics of the detectors: robust estimates, change points, CUSUM thresholds, peers."""
