"""The choice of a job's next layout, or of none, with its reason and prices. Pure.

In: a `PlanningSnapshot` (`inputs.snapshot_of` makes it of a job's state) and the settings. Out:
`decide.decide` returns a `Decision`. `candidates` builds a layout per mitigation level, with
`replica_candidates` and `repartition_candidates`; `pricing` predicts the step time of each;
`failure_domains`, `failure_rates` and `cordons` hold what a layout must respect. The app runs it in
a thread; the searches themselves are in `planning`.
"""
