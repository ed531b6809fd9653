"""What the pages of the web page say: nodes, their past, incidents, however many there are."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

starlette = pytest.importorskip("starlette.testclient", reason="needs pacekeeper[web]")

from starlette.testclient import TestClient  # noqa: E402

from pacekeeper.controller.fleet_memory import Strike  # noqa: E402
from pacekeeper.controller.web_words import brief  # noqa: E402
from pacekeeper.core.findings import FindingKind  # noqa: E402
from pacekeeper.core.orders import Order, OrderKind  # noqa: E402
from support.web_scene import BEGAN_S, Scene, incident, scene  # noqa: E402

HTML = {"accept": "text/html"}


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[Scene]:
    found = scene(tmp_path, num_nodes=4)
    yield found
    found.history.store.close()
    found.audit.close()


def opened(seen: Scene) -> TestClient:
    return TestClient(seen.web().app(), base_url="http://127.0.0.1:8080")


def struck(seen: Scene, *, on: str, times: int, device: str = "GPU-1") -> None:
    strikes = tuple(
        Strike(
            incident_id=i + 1,
            node=on,
            device_uuid=device,
            job="of-old",
            kind=FindingKind.DEVICE,
            slowdown=1.4,
            unix_s=BEGAN_S - i * 86_400.0,
        )
        for i in reversed(range(times))
    )
    known = {**seen.state.strikes, on: strikes}
    seen.state = replace(seen.state, strikes=known, unix_offset_s=BEGAN_S, ticked_s=0.0)


def test_nodes_by_their_past_come_lemons_first_also_those_that_are_gone(seen: Scene) -> None:
    struck(seen, on="gpu-001", times=1)
    struck(seen, on="gone-node", times=4)
    page = opened(seen).get("/strikes", headers=HTML).text
    assert page.index(">gone-node<") < page.index(">gpu-001<") and ">gpu-002<" not in page
    assert "5 nodes: 1 away, 1 lemon, 2 with a slow device in the last 90 days, 0 cordoned" in page
    assert page.count(">Cordon<") == 1, "there is nothing to cordon of a node that is gone"
    node = opened(seen).get("/nodes/gone-node", headers=HTML).text
    assert "GPU-1" in node and "4 strikes" in node and 'href="/incidents/4"' in node
    assert "Nothing was found" in opened(seen).get("/nodes/gpu-002", headers=HTML).text


def test_a_word_finds_nodes_by_name_device_job_and_state(seen: Scene) -> None:
    struck(seen, on="gpu-001", times=3, device="GPU-abc")
    client = opened(seen)
    for find, names in (
        ("gpu-003", ["gpu-003"]),
        ("ABC", ["gpu-001"]),
        ("lemon", ["gpu-001"]),
        ("ablation", ["gpu-002", "gpu-003"]),
        ("cordoned", []),
    ):
        page = client.get("/nodes", params={"find": find}, headers=HTML).text
        found = [name for name in sorted(seen.state.nodes) if f">{name}<" in page]
        assert found == names, find


def test_of_many_incidents_a_hundred_are_shown_and_how_many_there_are_is_said(seen: Scene) -> None:
    job = seen.state.jobs["pretrain-moe"]
    many = tuple(incident(number, is_open=number > 240) for number in range(1, 251))
    jobs = {**seen.state.jobs, job.name: replace(job, incidents=many)}
    seen.state = replace(seen.state, jobs=jobs)
    client = opened(seen)
    page = client.get("/incidents", headers=HTML).text
    assert "1 to 100 of 250" in page and 'href="/incidents?first=100"' in page
    last = client.get("/incidents?first=200", headers=HTML).text
    assert "201 to 250 of 250" in last and ">#1<" in last
    open_ones = client.get("/incidents?open=1", headers=HTML).text
    assert ">#250<" in open_ones and ">#240<" not in open_ones
    assert client.get("/incidents?find=no-such", headers=HTML).text.count(">#") == 0
    assert "the newest 100 of 250" in client.get("/jobs/pretrain-moe", headers=HTML).text


def test_who_has_just_given_an_order_sees_it(seen: Scene) -> None:
    client = opened(seen)
    assert "by ada: fan" not in client.get("/part/nodes", headers=HTML).text
    order = Order(
        kind=OrderKind.CORDON_NODE, subject="gpu-001", said_by="ada", reason="fan", since_unix_s=0.0
    )
    seen.state = replace(seen.state, orders=(order,))
    assert "by ada: fan" in client.get("/part/nodes", headers=HTML).text


def test_a_table_tells_of_a_cause_what_was_seen_and_the_incident_s_page_all_of_it() -> None:
    cause = "confirmed clocks: held down; not unusual: load; not told: fan; probable heat: 92 C"
    assert brief(cause) == "confirmed clocks: held down; probable heat: 92 C"
    assert brief("") == brief("not told: all") == ""


def test_moments_are_told_in_utc_for_the_browser_to_write_in_its_own_zone(seen: Scene) -> None:
    page = opened(seen).get("/incidents/1", headers=HTML).text
    assert '<time class="moment" datetime="2026-02-25T06:20:02Z">2026-02-25 06:20:02 UTC' in page
