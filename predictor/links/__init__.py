"""Locates slow links: a node, the port of a rank, a pair of ranks or of nodes. Pure.

`slow_links` detects slow transfers of ranks. `places` intersects the groups of ranks whose
transfers are slow. `pair_rates` makes such groups of the pairs of a probe, compared with their own
history and with peers of the same kind. In: times of transfers, the node of each rank. Out: places
with a slowdown, its interval and a rate. Called by `controller/detection` and
`controller/mitigation`.
"""
