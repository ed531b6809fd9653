"""Finds and prices uneven work: by stage, micro-batch and expert. Gives advice, never a fault."""
