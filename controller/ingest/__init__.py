"""Receives agents' reports in a process of its own and passes them on as packed frames.

In: agents' gRPC streams (`worker`, the ingest process, by `http2`). Out: events for the state
machine (`agent_service`, in the controller). `ipc` frames the bytes between the two processes,
`supervisor` starts and restarts the ingest process.
"""
