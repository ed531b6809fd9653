"""The daemon on every GPU node: reads rings, NVML and the kernel, and reports to the controller.

In: the ranks' ring files, NVML, /proc and /sys, and the controller's commands.
Out: reports on one gRPC stream, commands in the ring files, the node's health, Prometheus metrics.

`daemon` wires the parts; `nvml` and `host` take samples; `rings` reads and writes ring files;
`uplink` holds the stream; `health` publishes the node's health to launchers and NVSentinel.
The agent imports neither the controller nor the predictor.
"""
