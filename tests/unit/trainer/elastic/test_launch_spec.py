"""How many ranks a node can start, from what its kernel and its limits say."""

from pathlib import Path

import pytest

from pacekeeper.core.errors import HostError
from pacekeeper.trainer.elastic.launch_spec import (
    RANK_BYTES,
    NodeLimits,
    check_startable,
    node_limits,
)


def limits(ranks: int = 8, open_files: int | None = 1024) -> NodeLimits:
    return NodeLimits(memory_bytes=ranks * RANK_BYTES, open_files=open_files)


def test_as_many_ranks_as_have_room_are_started_and_no_more() -> None:
    check_startable(8, 8, limits(8))
    with pytest.raises(HostError, match=r"9 ranks need 1\.1 GiB .* 1\.0 GiB .*at most 8 with"):
        check_startable(9, 9, limits(8))


def test_each_rank_connects_to_all_of_the_job_whatever_node_they_are_on() -> None:
    check_startable(2, 992, limits(open_files=1024))
    with pytest.raises(HostError, match=r"each of 1000 ranks needs 1032 .* `ulimit -n 1032`"):
        check_startable(2, 1000, limits(open_files=1024))


def test_what_the_system_does_not_tell_refuses_nobody() -> None:
    check_startable(10_000, 10_000, NodeLimits(memory_bytes=None, open_files=None))


def test_a_container_has_what_its_group_leaves(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4096 kB\n")
    assert node_limits(tmp_path, tmp_path / "none").memory_bytes == 4096 * 1024
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert node_limits(tmp_path, tmp_path).memory_bytes == 2_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert node_limits(tmp_path, tmp_path).memory_bytes == 4096 * 1024
    assert node_limits(tmp_path / "none", tmp_path / "none").memory_bytes is None
