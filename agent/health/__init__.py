"""Health of the node for other tools: `pacekeeper healthcheck`, NVRx's launcher, NVSentinel.

In: device samples and the ranks named by the controller's findings. Out: a file in the
ring directory, a gRPC service on a Unix socket, and events to NVSentinel's connector.
"""
