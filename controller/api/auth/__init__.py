"""Authentication, authorisation, rate limits and audit of all callers.

In: gRPC contexts, HTTP requests and the identity of an agent stream. Out: a `Principal`, or a
rejection with its reason, and entries in the audit log. `ListenerSetup` (listeners.py) builds all
of it; ingest sees only `AttachPolicy`.
"""
