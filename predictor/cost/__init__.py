"""Predicts times from workload, layout and speeds.

`features` turns micro-batches into feature tables; `model` fits compute times of healthy steps by
`regression`, or by a regressor named in the settings (`named_regressor`); `estimator` wraps the
same regression for scikit-learn; `forecast` prices a step of a layout; `iteration` and
`longest_path` give the time of a pipelined iteration.
"""
