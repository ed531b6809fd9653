"""Analyses a recorded run: residuals, slow ranks, stragglers of collectives, heat map.

In: a `Trace`, which the readers in `simulator` make of files. Out: `analyze.analyze` returns a
`TraceReport`: anomalies with their causes, and what-if costs.
"""
