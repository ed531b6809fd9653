"""Hooks and wrappers that adapters share: passes, collectives, batches, expert loads.

In: modules and functions of a foreign trainer. Out: calls of a reporter (`trainer.adapters`). What
is hooked or wrapped is restored by `close`, `detach` or `undo`.
"""
