"""Samples of the node's kernel: load, pressure, memory, network and wall clock.

In: small files below /proc and /sys, and adjtimex. Out: `HostSample`. Missing values are None.
"""
