"""What the detector can find now: sensitivity, canaries, and the verdict of a probe."""
