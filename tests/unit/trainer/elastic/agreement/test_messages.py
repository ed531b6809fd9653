"""What launchers and ranks hear of each other is understood, or refused in words."""

import json
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import LostStateError, VersionError
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.resize.shrink import RecoveryPlan
from pacekeeper.core.telemetry.shm_ring import MAX_RANKS
from pacekeeper.trainer.elastic.agreement.kv_store import (
    Stores,
    connect_store,
    host_store,
    parse_notices,
)
from pacekeeper.trainer.elastic.agreement.messages import (
    ASKING_KEY,
    Candidate,
    JobFacts,
    Report,
    asking_key,
    decode_admission,
    decode_asking,
    encode_admission,
    encode_asking,
    number_in,
    read_verdict,
    write_lost,
    write_verdict,
)
from pacekeeper.trainer.elastic.agreement.quorum import Group
from pacekeeper.trainer.elastic.agreement.two_phase_commit import Phase, Progress
from pacekeeper.trainer.elastic.joining.join_queue import JoinQueue
from pacekeeper.trainer.elastic.joining.node_join import numbers_taken
from pacekeeper.trainer.elastic.rendezvous import check_terms
from pacekeeper.trainer.elastic.restart_policy import parse_ends, parse_next

GROUP = Group.first(1, (0, 1))
LAYOUT = even_layout(ranks=[0, 1, 2], num_layers=2, num_experts=3, replicas=2)
FACTS = JobFacts(
    run_id=7, first_run_id=7, generation=1, world_size=2,
    config=EngineConfig(job="moe", data=("a.bin", "b.bin")),
    addresses=("h:1", ""), node_of={0: 0, 1: 1}, members=(0, 1), data_crc=9,
)  # fmt: skip
REPORT = Report(
    progress=Progress(ticket=3, phase=Phase.VOTE), newest_generation=2, last_loss=1.5, step=3
)
ONE = Candidate(node=2, address="h:3", ranks=(2,))
VERDICT = write_verdict(
    RecoveryPlan(layout=LAYOUT), commits=(0,), furthest=REPORT, newcomers=(ONE,), base=LAYOUT
)
NOT_JSON = ("", "{", "\ufffd", "[" * 100_000, "9" * 5000, "null", "7", "[]", '""', "{}")


def _without(text: str, *path: str, value: Any = None) -> str:
    """With another value there."""
    document = json.loads(text)
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(document)


@pytest.mark.parametrize("text", NOT_JSON)
def test_what_is_no_word_of_ours_is_refused_with_what_to_do(text: str) -> None:
    for read in (JobFacts.decode, decode_asking, decode_admission, Report.decode):
        with pytest.raises(VersionError, match="install the same pacekeeper"):
            read(text)
    with pytest.raises(VersionError):
        read_verdict(GROUP, text)
    with pytest.raises(VersionError):
        check_terms("h:1", text, '{"job": "moe"}')


def test_what_is_ours_is_understood() -> None:
    assert JobFacts.decode(FACTS.encode()) == FACTS
    assert Report.decode(REPORT.encode()) == REPORT
    assert decode_asking(encode_asking(ONE, 4)) == (ONE, 4)
    assert decode_admission(encode_admission(GROUP, VERDICT, FACTS)) == (GROUP, VERDICT, FACTS)
    verdict = read_verdict(GROUP, VERDICT)
    assert (verdict.layout, verdict.base, verdict.newcomers) == (LAYOUT, LAYOUT, (ONE,))
    with pytest.raises(LostStateError, match="gone"):
        read_verdict(GROUP, write_lost(LostStateError("gone")))
    endless = replace(REPORT, last_loss=float("inf"))
    assert Report.decode(endless.encode()) == endless


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run_id", "7"),
        ("run_id", True),
        ("generation", -1),
        ("world_size", 0),
        ("addresses", ["h"]),
        ("addresses", "h:1"),
        ("node_of", [[0, 0]]),
        ("node_of", [[0, 10**12], [1, 1]]),
        ("node_of", [[0, 0, 0]]),
        ("members", []),
        ("members", [MAX_RANKS]),
        ("config", {"job": "../x"}),
        ("config", {"job": "moe", "steps": "7"}),
        ("config", {"job": "moe", "never_heard_of": 1}),
        ("data_crc", None),
        ("data_crc", 1.5),
    ],
)
def test_facts_of_a_job_with_one_impossible_value_are_refused(key: str, value: Any) -> None:
    with pytest.raises(VersionError, match="the job's launchers"):
        JobFacts.decode(_without(FACTS.encode(), key, value=value))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layout", 7),
        ("layout", "{}"),
        ("base", {}),
        ("restore", "abc"),
        ("commits", [[0]]),
        ("commits", [-1]),
        ("last_loss", "1.5"),
        ("was_applied", "no"),
        ("ticket", 2**63),
        ("step", None),
        ("only_lost", 0),
        ("newcomers", [{"node": 10**12, "address": "h:3", "ranks": [2]}]),
        ("newcomers", [{"node": 2, "address": "h", "ranks": [2]}]),
        ("lost", {}),
    ],
)
def test_a_verdict_with_one_impossible_value_is_followed_by_nobody(key: str, value: Any) -> None:
    with pytest.raises(VersionError, match="the others"):
        read_verdict(GROUP, _without(VERDICT, key, value=value))


def test_an_admission_into_an_impossible_group_is_refused() -> None:
    text = encode_admission(GROUP, VERDICT, FACTS)
    for key, value in (("members", "01"), ("electorates", [0]), ("has_stood", 1), ("line", [1])):
        with pytest.raises(VersionError, match="the members"):
            decode_admission(_without(text, "group", key, value=value))


def test_notices_that_name_nobody_are_nobodys() -> None:
    told = "1@first,x@first,@,-3@a,99999@a,\u0663@a," + "9" * 5000 + "@a,2,"
    assert parse_notices(told) == {1: "first", 2: ""}
    assert parse_ends("0@1,1@,2@x,@7,3@137,4@-9,") == {0: 1, 3: 137}


def test_the_nodes_of_the_next_life_are_numbers() -> None:
    assert parse_next("0,2") == (0, 2)
    for text in ("", "0,", "0,x", "0,0", "0,-1", "9" * 5000):
        with pytest.raises(VersionError):
            parse_next(text)


def test_a_claim_is_for_some_ranks() -> None:
    assert numbers_taken("4 17 1772") == 4
    for text in ("", "0 1 2", "-4 1", "x", f"{MAX_RANKS} 1"):
        with pytest.raises(VersionError, match="no number of ranks"):
            numbers_taken(text)


def test_numbers_are_short_and_plain() -> None:
    assert [number_in(text) for text in ("0", "16383", "007")] == [0, 16383, 7]
    for text in ("", " 1", "1.0", "+1", "16384", "1" * 6, "\u0661"):
        assert number_in(text) is None


def test_the_join_queue_reads_the_others_beside_one_who_writes_garble() -> None:
    server = host_store("127.0.0.1", 0)
    store: Any = connect_store(f"127.0.0.1:{server.port}")
    queue = JoinQueue(f"127.0.0.1:{server.port}")
    store.set(ASKING_KEY, b"5,\xff\xff," + b"9" * 5000 + b",2,4,")  # nothing stands behind 5
    store.set(asking_key(4), b"\xff\xfe")
    for beat in (1, 2):
        store.set(asking_key(2), encode_asking(ONE, beat))
        found = queue.poll(store)
    assert found == (ONE,)


def test_a_key_that_is_no_text_costs_nobody_the_store() -> None:
    server = host_store("127.0.0.1", 0)
    connect_store(f"127.0.0.1:{server.port}").set("job", b"\xff\xfe")
    stores = Stores((f"127.0.0.1:{server.port}",))
    assert stores.read(0, "job") == "\ufffd\ufffd"
    assert not stores.gone
    stores.close()
