"""Conversion between messages and the plain values of `core`; the only place that knows both.

`reports` is for agent and controller, `records` and `samples` are its parts, `json` is for the CLI.
"""
