"""Which layout to run next: expert placement, token shares, and the partition of model and batch.

Inside: `experts` (replica ranks of every expert), `partition` (layers, shards, rows, standby
ranks), `partition_cost` (time, memory and transfers of a partition), `token_split` (shares over
given replica ranks), `reliability` (survival of node losses), `eplb` (a drop-in for
EPLB), `model` (values). In: loads, speeds, links, failure probabilities. Out: plans with
certificates. Called by the policy, `pacekeeper plan` and the simulator; performs no I/O.
"""
