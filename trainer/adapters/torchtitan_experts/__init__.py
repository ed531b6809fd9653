"""Expert replicas in torchtitan, by its own overrides: `--override.imports` of `overrides`.

Comes in: a torchtitan Trainer whose experts have slots and whose dispatcher follows a layout, and
plans of the controller. Goes out: tokens to replicas by the layout's shares, one gradient of all
replicas of an expert, checkpoints without replicas, and placements that change between steps.
`replicas` is a rank's part in plans, `slots` the experts of one layer, `sharing` the gradients of
replicas, `checkpoint` and `states` their weights and optimizer state. Only `overrides` imports
torchtitan. See docs/trainer-torchtitan.md.
"""
