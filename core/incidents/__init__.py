"""Findings, incidents, decisions, proposals and operator orders, as values.

In: what the controller detected and what operators ordered. Out: values that the state machine
keeps, the store writes and the command line shows, plus the health of one node and the rule for
restarting a job.
"""
