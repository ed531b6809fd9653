"""The controller's SQLite store: jobs, layouts, incidents, decisions, proposals, history.

In: commands of the state machine, and timelines. Out: rows of one file, and the part of the state
that a restarted controller begins with (`restore`). `store` is the entry point; `change_log` keeps
what a transaction changed, for replicas on other controllers.
"""
