"""Receives agents' reports in processes of their own and passes them on as packed frames.

In: agents' gRPC streams (`worker`, the ingest process, with `agent_stream`). Out: events for the
state machine (`agent_service`, in the controller). `ipc` frames the bytes between the processes,
`supervisor` starts and restarts one ingest process, `fronts` holds them all. `report_pacing` is how
often agents report.
"""
