"""Process groups of the engine: one small interface, and what stands behind it.

`group` has the interface (`Group`, `PeerLost`) and groups that cannot be left; `engine_groups` the
groups of an engine. `former` forms those of an elastic job, one generation after the other:
`elastic` meets, waits and leaves; `gloo` and `reconfiguring` connect; `waiting` has deadlines and
threads that may be left. Store, name and members come in; nothing here decides who is dead.
"""
