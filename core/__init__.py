"""The vocabulary that all parts share: values and pure functions on them.

In: the standard library only. Out: layouts and their changes
(`layout`), what ranks and nodes report (`telemetry`), what a checkpoint holds (`checkpoint`),
findings and decisions (`incidents`), settings (`config`). Nothing here reads a clock, a file or a
socket.
"""
