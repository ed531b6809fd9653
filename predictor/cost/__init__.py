"""Predicts times from workload, layout and speeds.

`features` turns micro-batches into feature tables, `model` fits compute times to healthy steps,
`forecast` and `longest_path` price a step of a layout.
"""
