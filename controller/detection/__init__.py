"""Judges complete steps: slow ranks, links, inputs and jobs become findings and incidents. Pure.

In: a `JobState` and the records of a step. Out: the job with its detectors and incidents changed,
and commands (log lines, publications) for the app. `peer_groups` judges ranks of one role,
`job_level` jobs without compute times, `links` transfers, `data_loading` input waits, `imbalance`
uneven work; `root_cause` names the cause of a finding; `coverage` states whether a slowdown would
be detected now; `incidents` opens, updates and closes incidents. Called by the state machine; the
statistics are in `predictor`.
"""
