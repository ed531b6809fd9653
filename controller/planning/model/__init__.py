"""Values that describe a planning problem: model cost, devices, links, and a partition of the job.

`problem` holds the input (`PartitionProblem`), `partition` the result (`PartitionPlan`). All other
packages of planning may import it; it imports none of them.
"""
