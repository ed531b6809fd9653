"""What the detector can find now: sensitivity, canaries, and the verdict of a probe.

In: detector state, features of a step, records of a probe. Out: the smallest detectable slowdown,
or why there is none (`sensitivity`); results of canaries (`canary`); the certainty of a probed
finding (`probe_verdict`).
"""
