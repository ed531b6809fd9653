"""Receives agents' reports in separate processes and passes them to the controller in frames.

In: agents' gRPC streams (`worker`, the ingest process, with `agent_stream`). Out: events for the
state machine (`agent_service`, in the controller). `ipc` encodes the frames between the processes,
`supervisor` starts and restarts one ingest process, `processes` supervises all of them.
`report_pacing` computes how often agents report.
"""
