"""Sums of dense gradients over ranks, and parameters that no rank used."""

from collections.abc import Collection, Sequence

import pytest
import torch
from torch import nn

from pacekeeper.core.layout.layout import BlockKind, StateOwner
from pacekeeper.trainer.model.blocks import Part
from pacekeeper.trainer.model.cuts import Cut
from pacekeeper.trainer.parallel.gradients.dense import DensePart, dense_buckets
from pacekeeper.trainer.parallel.gradients.sync import GradientSync, clip_global_norm
from support.rank_threads import ThreadGroup, run_ranks


def parts_of(parameters: Sequence[nn.Parameter], holders: tuple[int, ...]) -> list[DensePart]:
    return [
        DensePart(parameter=p, part=Part(p), holders=holders, place=place, updated=Part(p))
        for place, p in enumerate(parameters)
    ]


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_a_parameter_that_no_rank_used_is_left_alone(bucket_bytes: int) -> None:
    def work(group: ThreadGroup) -> tuple[list[torch.Tensor | None], list[torch.Tensor], float]:
        everywhere, on_one, unused = (nn.Parameter(torch.ones(2, 2)) for _ in range(3))
        dense = [unused, on_one, everywhere]
        parts = parts_of(dense, group.ranks)
        buckets = [bucket for _, bucket in dense_buckets(parts, group, bucket_bytes)]
        sync = GradientSync(buckets=buckets)
        optimizer = torch.optim.AdamW(dense, lr=0.1, weight_decay=0.5)
        sync.arm()
        loss = everywhere.sum() * (1 + group.rank)
        (loss + (on_one.sum() if group.rank == 1 else 0.0)).backward()
        sync.finish()
        norm = clip_global_norm(parts, [], group, 0.1, torch.zeros(()))
        found = [p.grad if p.grad is None else p.grad.clone() for p in dense]
        optimizer.step()
        return found, [p.detach().clone() for p in dense], norm.item()

    for gradients, parameters, norm in run_ranks(2, work):
        unused, on_one, everywhere = gradients
        assert unused is None
        assert norm == pytest.approx((4 * 3.0**2 + 4 * 1.0) ** 0.5)
        assert on_one is not None and everywhere is not None
        assert torch.allclose(everywhere, 3 * on_one)
        assert on_one.norm() > 0
        assert torch.equal(parameters[0], torch.ones(2, 2))
        assert parameters[1].max() < 1.0


def test_a_bucket_ends_with_the_part_that_fills_it() -> None:
    """Parts of 16 bytes; parts of other holders do not count."""

    def work(group: ThreadGroup) -> list[int]:
        both, one = ([nn.Parameter(torch.ones(4)) for _ in range(n)] for n in (7, 3))
        parts = parts_of(both, group.ranks)
        parts[2:2] = parts_of(one, (group.rank,))
        return [len(bucket.parameters) for _, bucket in dense_buckets(parts, group, 40)]

    assert run_ranks(2, work) == [[3, 3, 1]] * 2


def test_a_step_without_any_gradient_measures_zero() -> None:
    def work(group: ThreadGroup) -> float:
        dense = [nn.Parameter(torch.ones(2))]
        parts = parts_of(dense, group.ranks)
        return clip_global_norm(parts, [], group, 1.0, torch.zeros(())).item()

    assert run_ranks(2, work) == [0.0, 0.0]


class Noted:
    """A bucket that notes when it starts."""

    def __init__(self, name: str, parameters: Sequence[nn.Parameter], notes: list[str]) -> None:
        self.name, self.parameters, self._notes = name, parameters, notes

    def start(self, unused: Collection[int] = ()) -> None:
        self._notes.append(f"{self.name} starts")

    def finish(self) -> Sequence[tuple[nn.Parameter, bool]]:
        self._notes.append(f"{self.name} ends")
        return ()


def test_buckets_start_in_their_order_while_the_backward_pass_goes_on() -> None:
    notes: list[str] = []
    first, middle, last = (nn.Parameter(torch.ones(2)) for _ in range(3))
    for name, parameter in {"first": first, "middle": middle, "last": last}.items():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: notes.append(f"gradient of {name}")
        )
    sync = GradientSync(
        buckets=[Noted("end", [last], notes), Noted("begin", [first, middle], notes)]
    )

    def backward() -> None:
        (((torch.ones(2) * first).sin() * middle).sin() * last).sum().backward()

    backward()
    assert not [note for note in notes if "starts" in note], "before the last micro-batch"
    notes.clear()
    sync.arm()
    backward()
    assert notes.index("end starts") < notes.index("gradient of middle")
    assert notes[-1] == "begin starts"
    sync.finish()
    assert notes[-2:] == ["end ends", "begin ends"]
    assert len([note for note in notes if "starts" in note]) == 2


CUT = Cut(kind=BlockKind.ATTENTION, dim=0, num_shards=2)
OWNERS = (StateOwner(1, 0), StateOwner(0, 2))


def divided_parts(parameter: nn.Parameter, rank: int, is_owned: bool) -> list[DensePart]:
    """Of two shards rank 0 has both, rank 1 the first and rank 2 the second."""
    run = (range(2), range(1), range(1, 2))[rank]
    found = []
    for shard in run:
        part = Part(parameter, None, CUT, run, shard)
        has_state = not is_owned or rank in OWNERS[shard].ranks
        found.append(
            DensePart(
                parameter=parameter,
                part=part,
                holders=(0, 1 + shard),
                place=0,
                owner=OWNERS[shard] if is_owned else None,
                updated=part if has_state else None,
            )
        )
    return found


@pytest.mark.parametrize("is_owned", [False, True])
@pytest.mark.parametrize("is_used", [False, True])
def test_a_divided_parameter_decays_only_if_some_rank_used_it(
    is_owned: bool, is_used: bool
) -> None:
    def work(group: ThreadGroup) -> tuple[torch.Tensor | None, torch.Tensor]:
        parameter = nn.Parameter(torch.ones(2 if group.rank == 0 else 1, 3))
        parts = divided_parts(parameter, group.rank, is_owned)
        sync = GradientSync(buckets=[one for _, one in dense_buckets(parts, group)])
        optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.5)
        if is_used and group.rank:  # as one pipeline of two ranks does, and the other does not
            parameter.grad = torch.full_like(parameter, float(group.rank))
        sync.finish()
        gradient = None if parameter.grad is None else parameter.grad.clone()
        optimizer.step()
        return gradient, parameter.detach()

    expected = torch.tensor([[1.0] * 3, [2.0] * 3])
    for rank, (gradient, parameter) in enumerate(run_ranks(3, work)):
        if not is_used:
            assert gradient is None and torch.equal(parameter, torch.ones_like(parameter))
        else:
            rows = [0, 1] if rank == 0 else [rank - 1]
            assert gradient is not None and torch.equal(gradient, expected[rows])
