"""A stranger at the stores of a running job: it changes nothing that the job computes."""

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from pacekeeper.core.addresses import split_address
from pacekeeper.core.errors import ExitCode
from pacekeeper.trainer.elastic.agreement.job_key import UNSIGNED, JobKey
from pacekeeper.trainer.elastic.agreement.kv_store import fence_key
from support.exact_jobs import exact_job
from support.fleet import Fleet, Launcher

pytest.importorskip("transformers")


def test_a_stranger_ends_no_rank_and_its_store_is_not_believed_any_more(tmp_path: Path) -> None:
    """Half of the ranks with the lowest go on; the launcher of the other half says why it ends."""
    config = exact_job(tmp_path, steps=40, replicas=2)
    with Fleet(directory=tmp_path, config=config, num_nodes=2, ranks_per_node=1) as fleet:
        fleet.await_step(5, 1)
        host, port = split_address(fleet.launchers[1].address())
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), 60.0)
        stranger: Any = TCPStore(host, port, is_master=False, wait_for_workers=False)
        stranger.set(fence_key(1), "silent")
        assert fleet.codes() == [0, ExitCode.DENIED]
        said = fleet.launchers[1].output()
        assert f"a message at key '{fence_key(1)}' is not signed with this job's secret" in said
        assert "is fenced" not in said
        fleet.assert_exact((0,))


@pytest.mark.parametrize("key", [UNSIGNED, JobKey(b"the secret of another")])
def test_a_node_without_the_secret_does_not_join(tmp_path: Path, key: JobKey) -> None:
    config = exact_job(tmp_path, steps=40, replicas=2)
    with Fleet(directory=tmp_path, config=config, ranks_per_node=2) as fleet:
        fleet.await_step(3, 0)
        at = fleet.launchers[0].address()
        other = Launcher(replace(fleet, key=key), 1, Path(), join_at=at)
        fleet.launchers.append(other)
        assert fleet.codes() == [0, ExitCode.DENIED]
        assert "--secret-file" in other.output()
        fleet.assert_exact((0, 1))


def test_without_any_secret_a_job_trains_and_says_so(tmp_path: Path) -> None:
    config = exact_job(tmp_path, steps=3)
    with Fleet(directory=tmp_path, config=config, ranks_per_node=2, key=UNSIGNED) as fleet:
        assert fleet.codes() == [0]
        assert (
            "any process that reaches this port can change the job" in fleet.launchers[0].output()
        )
        fleet.assert_exact((0, 1))
