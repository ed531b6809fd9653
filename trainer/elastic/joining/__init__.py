"""How nodes join a running job: the launcher that asks, the queue, and what members let in."""
