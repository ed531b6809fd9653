"""What the pages of the web page say: nodes, their past, incidents, however many there are."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

starlette = pytest.importorskip("starlette.testclient", reason="needs pacekeeper[web]")

from starlette.testclient import TestClient  # noqa: E402

from pacekeeper.controller.api.web.filters import ranks  # noqa: E402
from pacekeeper.controller.state.device_history import Strike  # noqa: E402
from pacekeeper.controller.state.events import SaveStack  # noqa: E402
from pacekeeper.core.incidents.findings import FindingKind  # noqa: E402
from pacekeeper.core.incidents.operator_orders import OperatorOrder, OrderKind  # noqa: E402
from pacekeeper.core.incidents.rank_failures import RankFailures  # noqa: E402
from pacekeeper.core.telemetry.sign_of_life import RankStack  # noqa: E402
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
    assert (
        "5 nodes: 1 disconnected, 1 lemon, 2 with a slow device in the last 90 days, 0 cordoned"
        in page
    )
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
    order = OperatorOrder(
        kind=OrderKind.CORDON_NODE,
        subject="gpu-001",
        operator="ada",
        reason="fan",
        since_unix_s=0.0,
    )
    seen.state = replace(seen.state, orders=(order,))
    assert "by ada: fan" in client.get("/part/nodes", headers=HTML).text


def test_moments_are_told_in_utc_for_the_browser_to_write_in_its_own_zone(seen: Scene) -> None:
    page = opened(seen).get("/incidents/1", headers=HTML).text
    assert '<time class="moment" datetime="2026-02-25T06:20:02Z">2026-02-25 06:20:02 UTC' in page


def killed(seen: Scene) -> None:
    """All of a job but what is over, a rank and then the others; then incidents of it are shown."""
    died = (
        RankFailures(ranks=((5, 5),), reason="its process ended by signal 9", step=8, unix_s=1.0),
        RankFailures(
            ranks=((0, 4), (6, 15)),
            reason="its process ended by signal 15",
            step=8,
            unix_s=2.0,
            closed_unix_s=3.0,
            closed_step=9,
        ),
    )
    finding = replace(incident(7).finding, kind=FindingKind.DEATH, rank=5, reason="words")
    nodes = ("gpu-000", "gpu-001")
    one = replace(incident(7, is_open=True), finding=finding, rank_failures=died, nodes=nodes)
    known = replace(seen.state.jobs["pretrain-moe"], incidents=(one,))
    seen.state = replace(seen.state, jobs={**seen.state.jobs, known.name: known})


def test_deaths_are_one_row_that_names_ranks_and_nodes_and_is_found_by_each(seen: Scene) -> None:
    killed(seen)
    with opened(seen) as page:
        listed = page.get("/incidents", headers=HTML).text
        assert listed.count('class="kind death"') == 1
        assert ">0-15</td>" in listed
        assert '/nodes/gpu-000">gpu-000</a> and 1 more' in " ".join(listed.split())
        for words in ("rank 11", "gpu-001"):
            assert "#7" in page.get("/incidents", params={"find": words}, headers=HTML).text
        assert "#7" not in page.get("/incidents", params={"find": "rank 16"}, headers=HTML).text


def test_a_page_of_deaths_says_of_all_why_when_and_without_whom_it_goes_on(seen: Scene) -> None:
    killed(seen)
    with opened(seen) as page:
        told = page.get("/incidents/7", headers=HTML).text
    assert "rank 5 is dead: its process ended by signal 9" in told
    assert "ranks 0-4 and 6-15 are dead: their processes ended by signal 15" in told
    assert "not yet</span>" in told and "since step 9" in told


def test_ranks_that_are_no_few_runs_are_counted_in_a_narrow_column() -> None:
    runs = [{"first": rank, "last": rank} for rank in range(0, 40, 2)]
    told = {"deaths": [{"ranks": runs}], "rank": 0}
    assert ranks({"deaths": [], "rank": 3}) == "3" and ranks({"deaths": [], "rank": None}) == ""
    assert ranks(told, 2) == "20 ranks" and ranks(told).endswith("and 12 more")


def test_the_stacks_of_a_rank_that_hung_are_on_the_page_of_its_incident(seen: Scene) -> None:
    for stack in (
        RankStack(rank=21, source="py-spy", text="File <string>, in waits"),
        RankStack(rank=22, source="", text="its process is gone"),
    ):
        seen.history.on_command(SaveStack(incident_id=1, stack=stack))
    page = opened(seen).get("/incidents/1", headers=HTML).text
    assert "Stacks of rank 21" in page and "File &lt;string&gt;, in waits" in page
    assert "its process is gone" in page
