"""Hooks and wrappers that adapters share: passes, collectives, batches, expert loads."""
