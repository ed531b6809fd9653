"""Attributes a finding to a cause.

Input: device, host and link samples around the onset, of the slow rank and of its peers. Output:
a cause with its evidence and confidence (`explain`).
"""
