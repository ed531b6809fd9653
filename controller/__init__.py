"""The central service for all jobs: a pure state machine with thin shells around it.

In: reports of agents, calls of operators, time. Out: commands to agents, status, metrics, a store.
Pure: `state` (values), `detection`, `mitigation`, `policy`, `planning`, and `machine`, which drives
them by events. Shells: `app` (process and loop), `ingest` (agents' streams), `api` (status service,
operators, web page), `storage`, `ha` (several controllers), `observability`.
"""
