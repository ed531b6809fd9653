"""Expert placement: which ranks hold a replica of each expert, and the certificate of the result.

In: loads [layers, experts], a `Cluster`, `Floors`, `Prices`, the present placement.
Out: `planner.plan_experts` returns an `ExpertPlan` with replica ranks, shares and its `Proof`.
Candidates come from `chained_declustering`, `small_swaps`, `bin_packing` and `ring_arcs`; `search`
takes the cheapest; `incremental`, `repair` and `local_search` change the present placement.
"""
