"""Two controllers and faults of their database: a slice of `failover_time`, and an outage."""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

import grpc
import pytest
from benchmarks import failover_time
from benchmarks.failover_faults import FAULTS
from benchmarks.failover_fleet import LIVE, Node, Ranks, lose_a_rank
from benchmarks.failover_tally import ZERO, Tally
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pacekeeper.protos import status_pb2, status_pb2_grpc
from pacekeeper.protos.stale_reads import AGE, READS
from support.controllers import until
from support.database_faults import Pooler
from support.failover import Pair
from support.postgres import cluster, new_database, open_root

pytestmark = pytest.mark.timeout(600)
SERVING = health_pb2.HealthCheckResponse.SERVING
BY_NAME = {kind.name: kind for kind in FAULTS}


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that servers, which do not run as root, may enter."""
    with tempfile.TemporaryDirectory(prefix="faults-", dir=open_root()) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize(
    ("is_pooled", "faults"),
    [
        (False, ("answers lost", "freeze in transaction", "commits unanswered")),
        pytest.param(
            *(False, ("disk full", "writer's bytes lost", "server crash")),
            marks=pytest.mark.stress,
        ),
        pytest.param(
            *(
                False,
                (
                    "freeze in transaction, server's clock -1 h",
                    "kill leader, server's clock -1 h",
                ),
            ),
            marks=pytest.mark.stress,
        ),
        (True, ("freeze in transaction", "kill leader")),
    ],
    ids=["bytes", "server", "clock", "pgbouncer"],
)
def test_nothing_acknowledged_is_lost_and_no_command_is_doubled(
    open_folder: Path, is_pooled: bool, faults: tuple[str, ...]
) -> None:
    if is_pooled and not Pooler.found():
        pytest.skip("pgbouncer is not installed (apt-get install pgbouncer)")
    tally = Tally(asked=len(faults))
    kinds = [BY_NAME[name] for name in faults]
    with failover_time.running(open_folder, Random(5), is_pooled=is_pooled) as run:
        for kind in failover_time.schedule(run, kinds, len(kinds)):
            run.fault(kind, str(len(run.times)))
        tally.add(run, run.stored(), "")
    figures = tally.figures()
    assert {name: figures[name] for name in ZERO} == dict.fromkeys(ZERO, 0), figures["wrong"]
    if figures["left_out"]:
        pytest.skip(f"not run on this host: {figures['left_out']}")


def test_while_the_database_is_away_training_goes_on_and_reads_say_their_age(
    tmp_path: Path,
) -> None:
    with cluster() as server, Pair(tmp_path, new_database(server.url())) as pair:
        pair.start(0)
        pair.start(1)
        pair.leader()
        node = Node(tmp_path, "n0", pair.both)
        ranks = Ranks([node])
        try:
            rings = lose_a_rank(node, "before")
            for address in pair.apis:
                until("the death is shown", partial(shows_first, address))

            server.stop("immediate")
            for address in pair.apis:
                until("it does not serve", partial(is_away, address))
                until("it answers reads", partial(serves, address, READS))
                until("it stands by", partial(stands_by, address))
            for number in range(3):
                rings += lose_a_rank(node, f"away-{number}")
            steps = ranks.num_steps
            until("training goes on", lambda: ranks.num_steps > steps + 10)
            for address in pair.apis:
                jobs, age_s = jobs_of(address)
                assert jobs == ["before"] and age_s is not None and age_s > 0.0

            server.start()
            leader = pair.apis[pair.leader()]
            wanted = ["away-0", "away-1", "away-2", "before"]
            until("all are known", lambda: jobs_of(leader) == (wanted, None))
        finally:
            ranks.close()
            node.kill()


def jobs_of(address: str) -> tuple[list[str], float | None]:
    """The jobs of listed deaths, one of each, and the answer's age; None: the leader's."""
    with grpc.insecure_channel(address) as channel:
        stub = status_pb2_grpc.StatusServiceStub(channel)
        try:
            answer, call = stub.ListIncidents.with_call(
                status_pb2.ListIncidentsRequest(), timeout=10.0
            )
        except grpc.RpcError:
            return [], None
    headers = dict(call.initial_metadata())
    jobs = sorted(one.job for one in answer.incidents if one.job != LIVE)
    return jobs, float(headers[AGE]) if AGE in headers else None


def shows_first(address: str) -> bool:
    return jobs_of(address)[0] == ["before"]


def stands_by(address: str) -> bool:
    return jobs_of(address)[1] is not None


def is_away(address: str) -> bool:
    return not serves(address, "")


def serves(address: str, service: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            return bool(stub.Check(request, timeout=10.0).status == SERVING)
        except grpc.RpcError:
            return False
