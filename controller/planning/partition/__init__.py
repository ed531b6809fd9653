"""The cheapest partition of layers, tensor shards and rows for the present device speeds.

In: a `PartitionProblem`. Out: `planner.plan_partition` returns a `PartitionPlan`;
`joint.plan_jointly` also places the experts. `group_search` proposes tensor groups, `shard_split`,
`layer_split` and `row_split` fill them, `builder` assembles a partition, `layout_codec` converts it
to a `Layout`.
"""
