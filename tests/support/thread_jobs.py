"""What a job of threads has come to: how well it answers for text it never saw, and its bits."""

import hashlib
from collections.abc import Iterable

import torch

from pacekeeper.core.layout.layout import Block
from pacekeeper.trainer.checkpoint.block_states import blocks_on
from pacekeeper.trainer.toy.engine.worker import Rank
from pacekeeper.trainer.toy.model.block_state_dict import (
    load_blocks,
    num_updates,
    read_block,
)
from pacekeeper.trainer.toy.model.dataset import Corpus
from pacekeeper.trainer.toy.model.flop_counter import WorkMeter, WorkPass
from pacekeeper.trainer.toy.model.transformer import MoETransformer
from support.thread_ranks import ThreadRanks


def loss_of(job: ThreadRanks, corpus: Corpus) -> float:
    """Mean over all targets of the first step of `corpus`, which nobody learns from."""

    def look(rank: Rank) -> float:
        rank.take_place()
        place = rank.layout.ranks.index(rank.spec.rank)
        rows = range(place, corpus.rows_per_step, len(rank.layout.ranks))
        with torch.no_grad():
            output = rank.model(corpus.batch(0, rows), WorkPass(WorkMeter()))
        return float(rank.fabric.exchange([float(output.loss_sum)]).sum())

    return job.together(look)[job.layout.ranks[0]] / corpus.target_tokens(0)


def reset(job: ThreadRanks, blocks: Iterable[Block]) -> None:
    """These blocks are as at the beginning, without moments: as if nobody had saved them."""
    lost = frozenset(blocks)
    for number, rank in job.ranks.items():
        held = blocks_on(job.layout, number)
        model = MoETransformer(job.config, job.layout, number)
        fresh = torch.optim.AdamW(model.parameters())
        first = {block: read_block(model, fresh, block) for block in held if block in lost}
        load_blocks(rank.model, rank.optimizer, held, first, num_updates(rank.optimizer))


def digest_of(job: ThreadRanks) -> str:
    """Of all weights and moments: equal for runs that are the same bit by bit."""
    found = hashlib.sha256()
    for block, state in sorted(job.blocks().items()):
        for name, part in state.items():
            found.update(f"{block} {name}".encode())
            found.update(part.contiguous().numpy().tobytes())
    return found.hexdigest()
