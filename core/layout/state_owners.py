"""Which rank keeps the optimizer state of each dense block, and which one a copy of it.

Dense blocks are replicated over pipelines. Their optimizer state is not: one holder owns it and
updates the block for all, a mirror does the same in case the owner dies. Replicas of experts, norms
and routers keep theirs each. Moving state between them: `core/layout/diff.py`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from pacekeeper.core.layout.balance import assign_evenly
from pacekeeper.core.layout.layout import Block, Layout, StateOwner
from pacekeeper.core.layout.replica_spread import NO_DOMAINS, DomainOf, domain_of_rank

NO_SIZES: Mapping[Block, int] = MappingProxyType({})


def assign_state_owners(
    layout: Layout,
    *,
    before: Layout | None = None,
    sizes: Mapping[Block, int] = NO_SIZES,
    domain_of: DomainOf = NO_DOMAINS,
) -> Layout:
    """`layout` with an owner and a mirror for the optimizer state of each of `owned_blocks()`.

    Owned bytes are even over the ranks that hold the same blocks, to within one block, and so are
    owned and mirrored bytes together. A mirror is in another failure domain than its owner where a
    holder is. Of `before`, owners and mirrors stay where that allows it; the mirror of an owner
    that is gone becomes the owner, or stays the mirror where that is more even. Deterministic.

    Args:
        layout: gives the holders of each block.
        before: the layout in use, with owners; default: nobody has any state yet.
        sizes: the bytes of each block's state; 1 where it is not named.
        domain_of: the failure domain of each rank.
    """
    able = {block: layout.holders(block) for block in layout.owned_blocks()}
    size = {block: sizes.get(block, 1) for block in able}
    had = {} if before is None else before.state_owner_by_block
    there = {
        block: [rank for rank in had[block].ranks if layout.holds_dense(rank, block)]
        for block in had
    }
    owners = assign_evenly(able, size, kept={block: of[0] for block, of in there.items() if of})
    domain = {rank: domain_of_rank(domain_of, rank) for rank in layout.working}
    is_wide = {ranks: len({domain[rank] for rank in ranks}) > 1 for ranks in set(able.values())}

    def may_mirror(block: Block, rank: int) -> bool:
        owner = owners[block]
        return rank != owner and not (is_wide[able[block]] and domain[rank] == domain[owner])

    replicated = {block: ranks for block, ranks in able.items() if len(ranks) > 1}
    copies = {
        block: next((rank for rank in reversed(of) if may_mirror(block, rank)), None)
        for block, of in there.items()
        if block in replicated
    }
    owned = Counter[int]()
    for block, rank in owners.items():
        owned[rank] += size[block]
    mirrors = assign_evenly(
        replicated,
        size,
        kept={block: rank for block, rank in copies.items() if rank is not None},
        is_allowed=may_mirror,
        loads=owned,
    )
    return replace(
        layout,
        state_owners=tuple(StateOwner(owners[block], mirrors.get(block)) for block in able),
    )
