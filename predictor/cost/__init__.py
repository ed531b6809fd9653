"""Predicts times from workload, layout and speeds.

`features` turns micro-batches into feature tables; `model` fits compute times to healthy steps by
`regression`, or by a regressor of the settings (`named_regressor`); `estimator` is the same for
scikit-learn; `forecast` and `longest_path` price a step of a layout.
"""
