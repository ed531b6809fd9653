"""The controller's store: jobs, layouts, incidents, decisions, proposals, history.

In: commands of the state machine, and timelines. Out: rows of one SQLite file or PostgreSQL
database, and the part of the state that a restarted controller begins with (`restore`). `store` is
the entry point, `tables` the one schema of both engines.
"""
