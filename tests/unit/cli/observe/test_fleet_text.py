"""The fleet by its past: lemons first, each device's history, nothing made up of the others."""

from rich.console import Console

from pacekeeper.cli.observe import fleet_text
from pacekeeper.controller.api.messages import gone_nodes, node_views
from pacekeeper.controller.api.node_sorting import fleet_summary, worst_first
from pacekeeper.controller.state.device_history import DAY_S, Strike, Strikes, add_strike
from pacekeeper.controller.state.state import NodeState, State
from pacekeeper.core.incidents.findings import FindingKind
from pacekeeper.core.incidents.operator_orders import OperatorOrder, OrderKind
from pacekeeper.protos import status_pb2

NOW_S = 1000.0 * DAY_S


def strike(number: int, node: str, device: str, days_ago: float) -> Strike:
    return Strike(
        incident_id=number,
        node=node,
        device_uuid=device,
        job=f"job-{number}",
        kind=FindingKind.DEVICE,
        slowdown=1.0 + number / 10,
        unix_s=NOW_S - days_ago * DAY_S,
    )


def views() -> dict[str, status_pb2.Node]:
    """One well, one struck once, a lemon, one cordoned, one that is known for its past only."""
    strikes: Strikes = {}
    for one in (
        strike(1, "gone", "GPU-g", 40.0),
        strike(2, "once", "GPU-o", 3.0),
        strike(3, "lemon", "GPU-a", 9.0),
        strike(4, "lemon", "GPU-b", 6.0),
        strike(5, "lemon", "GPU-a", 2.0),
    ):
        strikes = add_strike(strikes, one)
    names = ("well", "once", "lemon", "cordoned")
    order = OperatorOrder(
        kind=OrderKind.CORDON_NODE,
        subject="cordoned",
        operator="ada",
        reason="fan",
        since_unix_s=NOW_S,
    )
    state = State(
        nodes={name: NodeState(name=name, agent_incarnation="a", rack="r1") for name in names},
        strikes=strikes,
        orders=(order,),
        ticked_s=NOW_S,
    )
    found = [*state.nodes.values(), *gone_nodes(state)]
    return {view.name: view for view in node_views(state, found)}


def printed(value: object) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(value)
    return capture.get()


def test_lemons_come_first_then_the_most_and_the_newest_strikes_and_the_well_are_left_out() -> None:
    nodes = list(views().values())
    names = [one.name for one in worst_first(nodes, with_well=False)]
    assert names == ["lemon", "once", "gone", "cordoned"]
    everybody = [one.name for one in worst_first(nodes, with_well=True)]
    assert everybody == ["lemon", "once", "gone", "cordoned", "well"]


def test_a_line_says_how_often_which_devices_and_what_was_last() -> None:
    nodes = worst_first(list(views().values()), with_well=True)
    lines = printed(fleet_text.node_table(nodes, NOW_S)).splitlines()
    assert lines[1].split()[:7] == ["lemon", "connected", "r1", "lemon", "3", "2", "3"]
    assert all(word in lines[1] for word in ("x1.50", "job-5", "2.0"))
    assert lines[3].split()[:4] == ["gone", "disconnected", "-", "struck"]
    assert lines[4].split()[:7] == ["cordoned", "connected", "r1", "cordoned", "0", "0", "0"]
    assert lines[5].split()[3] == "ok"
    counts = [int(word) for word in fleet_summary(nodes).split() if word.isdigit()]
    assert counts == [5, 1, 1, 3, 90, 1]


def test_a_node_s_past_is_told_by_device_the_most_struck_first() -> None:
    lines = printed(fleet_text.node_history(views()["lemon"], NOW_S)).splitlines()
    names = ("GPU-a", "job-5", "job-3", "GPU-b", "job-4", "cordon lemon")
    assert [name for line in lines for name in names if name in line] == list(names)


def test_who_is_cordoned_is_told_by_whom_and_who_is_well_that_nothing_was_found() -> None:
    cordoned = printed(fleet_text.node_history(views()["cordoned"], NOW_S))
    assert "ada" in cordoned and "fan" in cordoned
    assert len(printed(fleet_text.node_history(views()["well"], NOW_S)).splitlines()) == 2
