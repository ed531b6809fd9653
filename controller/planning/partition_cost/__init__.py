"""Cost of a partition: step time, memory of each rank, and state to transfer.

In: a `Partition` and a `PartitionProblem`. Out: `step_time.price`, `memory.memory_bytes`,
`state_transfer.moves`. Knows nothing of the search in `partition`.
"""
