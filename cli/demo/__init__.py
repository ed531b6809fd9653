"""`pacekeeper demo`: a job on this machine with a slow rank, its mitigation, and a killed rank.

In: options (which rank, how slow, which clock). Out: a live view, figures (`metrics.Outcome`, with
--json as one line), an HTML report and a PNG in the run directory. `job` writes what is trained,
`fleet` starts the processes by the operator's commands, `script` injects the faults, `recorder`
reads the status service and the step logs, `metrics` computes the figures, `report` and `live_view`
show them.
"""
