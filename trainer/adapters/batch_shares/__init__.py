"""Batch shares for foreign trainers: ranks run unequal numbers of micro-batches in a step.

Comes in: plans of the controller, for jobs that opted in with `micro_batches_per_step=`. Goes out:
each rank's own micro-batches of a step (`dealing`), and losses weighted by tokens so that the
gradient is that of the whole global batch whatever the shares (`shares`). See
docs/plan-consumer.md.
"""

from pacekeeper.trainer.adapters.batch_shares.dealing import ShareSchedule, step_loader
from pacekeeper.trainer.adapters.batch_shares.shares import BatchShares

__all__ = ["BatchShares", "ShareSchedule", "step_loader"]
