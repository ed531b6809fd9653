"""Finds and prices uneven work: by stage, micro-batch and expert. Gives advice, never a fault.

Input: live steps (`advice`) or a recorded trace (`analyze`). Output: advisory findings, with the
step time that even work would save. `what_if` replays recorded steps with ideal times for some
parts.
"""
