"""Analyses a recorded run: residuals, slow ranks, collective stragglers, slow links, late inputs.

Input: a `Trace`, which the readers in `simulator` build from files. Output: `analyze.analyze`
returns a `TraceReport`: anomalies with their causes, and what-if costs.
"""
