"""Saves and restores blocks: asynchronous writing, snapshots in memory, restore onto any layout."""
