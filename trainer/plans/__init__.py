"""How any trainer takes plans of the controller: offered, voted on, applied or refused, reported.

Comes in: the offers of `trainer.hooks` and a `PlanConsumer`, what a trainer can carry out. Goes
out: a new layout for it, and records of plans that were applied or refused. docs/plan-consumer.md
has the protocol and an example; the elastic engine reads offers and counts votes by the same code.
"""
