"""Waits of torch.distributed, overheard: what pauses a clock, and what does not."""

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import _functional_collectives as functional
from torch.utils.checkpoint import checkpoint

from pacekeeper.trainer.adapters.instrumentation.collectives import WaitAwareClock
from pacekeeper.trainer.adapters.instrumentation.module_passes import at_end_of_backward
from pacekeeper.trainer.hooks.compute_timers import ComputeTime
from support.process_groups import lone_group


class Told:
    """A clock that writes down what it is told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def begin(self) -> None: ...

    def pause(self) -> None:
        self.heard.append("pause")

    def resume(self) -> None:
        self.heard.append("resume")

    def end(self) -> ComputeTime | None:
        return None

    @property
    def num_waits(self) -> int:
        assert self.heard == ["pause", "resume"] * (len(self.heard) // 2)
        return len(self.heard) // 2


class Broken(Told):
    def pause(self) -> None:
        raise RuntimeError("no clock")


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process, in which nobody listens yet."""
    with lone_group():
        yield


@pytest.fixture
def errors() -> list[Exception]:
    return []


def listening(clock: Told, errors: list[Exception]) -> Iterator[WaitAwareClock]:
    waits = WaitAwareClock(clock, errors.append)
    waits.attach()
    yield waits
    waits.detach()


@pytest.fixture
def clock() -> Told:
    return Told()


@pytest.fixture
def waits(alone: None, clock: Told, errors: list[Exception]) -> Iterator[WaitAwareClock]:
    yield from listening(clock, errors)
    assert errors == []


def test_a_collective_of_an_open_pass_is_a_wait(waits: WaitAwareClock, clock: Told) -> None:
    waits.begin()
    dist.all_reduce(torch.ones(3))
    assert clock.num_waits > 0


def test_outside_of_a_pass_nothing_pauses(waits: WaitAwareClock, clock: Told) -> None:
    dist.all_reduce(torch.ones(3))
    waits.begin()
    waits.close_pass()
    dist.barrier()
    assert clock.heard == []


def test_an_asynchronous_one_is_waited_for_when_it_is_waited_for(
    waits: WaitAwareClock, clock: Told
) -> None:
    waits.begin()
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert clock.heard == []
    work.wait()
    assert clock.num_waits == 1


def test_functional_collectives_are_waits_where_they_are_used(
    waits: WaitAwareClock, clock: Told
) -> None:
    waits.begin()
    given = torch.ones(4, requires_grad=True)
    got = functional.all_to_all_single_autograd(given, [4], [4], [0])
    total = (got * 2).sum()
    forward = clock.num_waits
    total.backward()  # from C++: no Python of torch's is in between
    assert forward == 1
    assert clock.num_waits == 2 + 1  # the last one: the end of the backward pass


def test_what_is_queued_for_the_end_of_a_backward_pass_is_a_wait(
    waits: WaitAwareClock, clock: Told
) -> None:
    """As DistributedDataParallel waits there for the gradients of all ranks."""
    leaf, heard = torch.ones(2, requires_grad=True), []
    leaf.register_hook(lambda _: at_end_of_backward(lambda: heard.append(clock.heard[-1])))
    for _ in range(2):
        waits.begin()
        (leaf * 2).sum().backward()
        waits.close_pass()
    assert heard == ["pause", "pause"]
    assert clock.num_waits == 2
    (leaf * 2).sum().backward()  # in no pass
    assert clock.num_waits == 2


def test_a_pass_that_ends_in_a_callback_of_a_backward_pass_ends_in_no_wait(
    waits: WaitAwareClock, clock: Told
) -> None:
    """As DeepSpeed ends one: its clock must not be read while it stands still."""
    leaf, heard = torch.ones(2, requires_grad=True), []

    def over() -> None:
        waits.close_pass()
        heard.extend(clock.heard)

    leaf.register_hook(lambda _: at_end_of_backward(over))
    waits.begin()
    (leaf * 2).sum().backward()
    assert heard == clock.heard == ["pause", "resume"]


def test_a_backward_pass_within_another_has_no_end_of_its_own(
    waits: WaitAwareClock, clock: Told
) -> None:
    leaf = torch.ones(2, requires_grad=True)
    waits.begin()
    again: torch.Tensor = checkpoint(torch.sin, leaf * 2, use_reentrant=True)
    (again.sum() + leaf.sum()).backward()
    assert clock.num_waits == 1
    assert leaf.grad is not None


def test_no_backward_pass_is_changed_by_being_heard(
    waits: WaitAwareClock, errors: list[Exception]
) -> None:
    leaf = torch.ones(2, requires_grad=True)
    waits.begin()
    (slope,) = torch.autograd.grad((leaf**3).sum(), leaf, create_graph=True)
    slope.sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [6.0, 6.0]
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(()).backward()
    torch.autograd.backward([leaf.sum(), (leaf * 2).sum()])
    assert leaf.grad.tolist() == [9.0, 9.0]
    assert errors == []


def test_a_wait_within_a_wait_counts_once(waits: WaitAwareClock, clock: Told) -> None:
    waits.begin()
    with waits.wait_block():
        dist.barrier()
    assert clock.num_waits == 1


def test_another_thread_waits_for_itself(waits: WaitAwareClock, clock: Told) -> None:
    waits.begin()
    other = threading.Thread(target=dist.all_reduce, args=(torch.ones(3),))
    other.start()
    other.join()
    assert clock.heard == []


def test_what_autograds_threads_wait_for_is_the_passes(waits: WaitAwareClock, clock: Told) -> None:
    class Reduced(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(gradients[0])
            return gradients[0]

    waits.begin()
    leaf = torch.ones(2, requires_grad=True)
    reduced: torch.Tensor = Reduced.apply(leaf)  # type: ignore[no-untyped-call]
    backward = reduced.sum().backward
    other = threading.Thread(target=backward)
    other.start()
    other.join()
    assert clock.num_waits > 0


def test_a_clock_that_fails_stops_no_collective(alone: None, errors: list[Exception]) -> None:
    made = listening(Broken(), errors)
    next(made).begin()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [1.0] * 3
    assert {str(error) for error in errors} == {"no clock"}
    assert list(made) == []


def test_a_method_named_by_its_user_is_a_wait_too(
    alone: None, clock: Told, errors: list[Exception]
) -> None:
    class Sharded:
        def gather(self) -> int:
            return 7

    plain = Sharded.gather
    waits = WaitAwareClock(clock, errors.append)
    waits.attach((Sharded, "gather"))
    waits.begin()
    assert Sharded().gather() == 7
    assert clock.num_waits == 1
    waits.detach()
    assert Sharded.gather is plain


def test_who_is_the_last_to_go_puts_everything_back(
    alone: None, clock: Told, errors: list[Exception]
) -> None:
    before = c10d.ProcessGroup.allreduce, c10d.Work.wait
    one, other = WaitAwareClock(clock, errors.append), WaitAwareClock(Told(), errors.append)
    one.attach()
    other.attach()
    one.detach()
    one.detach()  # again does no harm
    assert c10d.Work.wait is not before[1]
    other.detach()
    assert (c10d.ProcessGroup.allreduce, c10d.Work.wait) == before
    tensor = torch.ones(3)
    dist.all_reduce(tensor)  # a process trains on, evaluates, saves
    dist.broadcast(tensor, 0, async_op=True).wait()
    dist.barrier()
    assert tensor.tolist() == [1.0] * 3


def test_a_method_that_is_inherited_is_so_again(alone: None, errors: list[Exception]) -> None:
    class Group:
        def gather(self) -> int:
            return 7

    class Sharded(Group):
        pass

    waits = WaitAwareClock(Told(), errors.append)
    waits.attach((Sharded, "gather"))
    assert "gather" in vars(Sharded)
    waits.detach()
    assert "gather" not in vars(Sharded)
    assert Sharded().gather() == 7
