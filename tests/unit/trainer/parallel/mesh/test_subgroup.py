"""Collectives of some ranks, made of messages, give what those of a backend give."""

import torch

from pacekeeper.trainer.groups.group import SingleProcess
from pacekeeper.trainer.parallel.mesh.subgroup import SubGroup, subgroup
from support.rank_threads import ThreadGroup, run_ranks

MEMBERS = (0, 2, 3)


def test_an_all_reduce_has_the_same_bits_on_all_members() -> None:
    def work(group: ThreadGroup) -> list[torch.Tensor]:
        sums = []
        for size in ((), (1,), (2,), (7, 3)):  # fewer elements than members, and more
            generator = torch.Generator().manual_seed(group.rank)
            values = torch.rand(size, generator=generator)
            if group.rank in MEMBERS:
                subgroup(group, MEMBERS).all_reduce(values).wait()
            sums.append(values)
        return sums

    found = run_ranks(4, work)
    for number, size in enumerate(((), (1,), (2,), (7, 3))):
        given = [torch.rand(size, generator=torch.Generator().manual_seed(r)) for r in MEMBERS]
        for rank in MEMBERS:
            assert torch.equal(found[rank][number], found[0][number])
            assert torch.allclose(found[rank][number], torch.stack(given).sum(0))


def test_rows_and_values_arrive_in_the_order_of_ranks() -> None:
    def work(group: ThreadGroup) -> tuple[list[float], list[float]]:
        if group.rank not in MEMBERS:
            return [], []
        some = subgroup(group, MEMBERS)
        gathered = some.all_gather(torch.tensor([float(group.rank)]))
        send = [MEMBERS.index(group.rank)] * 3  # member 0 sends nothing
        output = torch.empty(3, 1)
        rows = torch.full((sum(send), 1), float(group.rank))
        some.all_to_all_rows(output, rows, [0, 1, 2], send).wait()
        return gathered.flatten().tolist(), output.flatten().tolist()

    for rank, (gathered, rows) in enumerate(run_ranks(4, work)):
        expected = ([0.0, 2.0, 3.0], [2.0, 3.0, 3.0]) if rank in MEMBERS else ([], [])
        assert (gathered, rows) == expected


def test_all_ranks_or_one_need_no_messages() -> None:
    alone = SingleProcess(5)
    assert subgroup(alone, (5,)) is alone

    def work(group: ThreadGroup) -> tuple[bool, bool, bool]:
        own = subgroup(group, (group.rank,))
        some = subgroup(group, (0, 1) if group.rank < 2 else (1, 2))
        return (
            subgroup(group, (2, 0, 1)) is group,
            own.ranks == (group.rank,),
            isinstance(some, SubGroup),
        )

    assert run_ranks(3, work) == [(True, True, True)] * 3
