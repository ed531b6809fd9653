"""Finds and prices uneven work: by stage, micro-batch and expert. Gives advice, never a fault.

In: live steps (`advice`) or a recorded trace (`analyze`). Out: advisory findings, with the step
time that even work would save. `what_if` replays recorded steps with parts at their usual speed.
"""
