"""How groups are formed on a device, by what this torch can do; ranks are threads."""

import threading
import time
from typing import Any

import pytest
import torch
from benchmarks.group_recovery import connectors, exchange_uneven
from torch._C._distributed_c10d import HashStore

from pacekeeper.core.errors import ConfigError
from pacekeeper.trainer.groups import former as former_module
from pacekeeper.trainer.groups.elastic import Members
from pacekeeper.trainer.groups.former import Former, Generation, make_former
from pacekeeper.trainer.groups.gloo import GlooConnector
from pacekeeper.trainer.groups.group import PeerLost
from pacekeeper.trainer.groups.reconfiguring import ReconfiguringConnector, can_reconfigure
from pacekeeper.trainer.groups.waiting import WaitLimits

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
LIMITS = WaitLimits(tick_s=0.02, timeout_s=30.0)


def test_on_the_cpu_groups_are_made_anew() -> None:
    former = make_former(CPU)
    assert isinstance(former._device, GlooConnector) and isinstance(former._host, GlooConnector)


def test_on_cuda_a_torch_that_cannot_reconfigure_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(former_module, "can_reconfigure", lambda _: False)
    with pytest.raises(ConfigError) as raised:
        make_former(CUDA)
    assert "2.15" in raised.value.remedy


@pytest.mark.skipif(not can_reconfigure(CUDA), reason="needs torch 2.15 with CUDA")
def test_on_cuda_the_device_groups_are_reconfigured_and_control_is_on_the_host() -> None:
    former = make_former(CUDA)
    assert isinstance(former._device, ReconfiguringConnector)
    assert isinstance(former._host, GlooConnector)


def former_of(way: str) -> Former:
    connector = connectors()[way]()
    return Former(connector, connector)


def form_all(
    formers: list[Former], store: HashStore, name: str, ranks: tuple[int, ...]
) -> dict[int, Generation]:
    formed: dict[int, Generation] = {}

    def form(rank: int) -> None:
        formed[rank] = formers[rank].form(
            Members(store, name, rank, ranks, is_aborted=lambda: False, limits=LIMITS)
        )

    in_threads(form, ranks)
    return {rank: formed[rank] for rank in ranks}


def in_threads(body: Any, ranks: tuple[int, ...]) -> None:
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            body(rank)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("way", ["new", "reconfigured"])
def test_generations_follow_each_other_and_abort_ends_its_own_only(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way not in connectors():
        pytest.skip("this torch cannot reconfigure groups")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    formers = [former_of(way) for _ in range(3)]
    store, before = HashStore(), dict[int, Generation]()
    for number, ranks in enumerate([(0, 1, 2), (0, 2), (0, 2)]):
        formed = form_all(formers, store, f"g{number}", ranks)
        for old in before.values():
            old.abort()  # once more: the one that stands does not notice

        def work(rank: int, formed: dict[int, Generation] = formed) -> None:
            groups = formed[rank].groups
            assert groups.exchange.rank == rank and groups.exchange.ranks == tuple(formed)
            exchange_uneven(groups.exchange, 2)
            values = torch.tensor([1.0, rank])
            groups.gradients.all_reduce(values).wait()
            assert values.tolist() == [len(formed), sum(formed)]
            told = groups.control.all_gather(torch.tensor([[rank], [7]]))
            assert told.tolist() == [[[member], [7]] for member in formed]
            exchange_uneven(groups.snapshots, 1)
            formed[rank].check()

        in_threads(work, ranks)
        for rank in ranks:
            formed[rank].abort()
            with pytest.raises(PeerLost):
                formed[rank].check()
            with pytest.raises(PeerLost):
                formed[rank].groups.control.all_gather(torch.ones(1))
        before = formed


@pytest.mark.parametrize("way", ["new", "reconfigured"])
def test_what_is_under_way_ends_when_the_generation_is_left(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before the timeout of gloo, which holds threads and tensors until then."""
    if way not in connectors():
        pytest.skip("this torch cannot reconfigure groups")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    formed = form_all([former_of(way) for _ in range(3)], HashStore(), "g", (0, 1, 2))
    pending: Any = formed[0].groups.gradients.all_reduce(torch.ones(3))
    formed[0].abort()
    with pytest.raises(PeerLost):
        pending.wait()
    give_up_s = time.monotonic() + LIMITS.timeout_s
    while not pending._work.is_completed():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    for one in formed.values():
        one.abort()


def test_a_job_of_one_rank_needs_no_store() -> None:
    generation = make_former(CPU).form(
        Members(HashStore(), "g", 4, (4,), is_aborted=lambda: False, limits=LIMITS)
    )
    assert generation.groups.exchange.ranks == (4,)
    generation.check()
    generation.abort()
    with pytest.raises(PeerLost):
        generation.check()
