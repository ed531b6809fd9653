"""The daemon on every GPU node: reads rings and NVML, streams to the controller."""
