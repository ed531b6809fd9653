"""Reads recorded runs into traces: own recordings, Kineto, Megatron logs, NCCL Inspector.

`registry` chooses the reader of a file; each reader raises DataError that names file and line.
"""
