"""Hooks for any training loop. Needs the standard library only.

`hooks.attach` returns the hooks of one rank: steps, micro-batches and waits go into the rank's
ring, plans come out of it. No call blocks or raises.
"""
