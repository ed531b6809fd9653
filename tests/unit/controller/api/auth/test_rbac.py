"""Who may do what is one table, and what stands in no table is refused."""

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from pacekeeper.controller.api.auth import rbac
from pacekeeper.controller.api.auth.rbac import (
    METHODS,
    Action,
    Principal,
    Role,
    anonymous,
    authorise,
    authorise_attach,
    combine,
    principal_of_certificate,
    principal_of_token,
)
from pacekeeper.protos import control_pb2, operator_pb2, status_pb2

MAY = {
    Role.VIEWER: {Action.READ, Action.HEALTH},
    Role.OPERATOR: {Action.READ, Action.ACT, Action.HEALTH},
    Role.AGENT: {Action.ATTACH, Action.HEALTH},
    Role.CONTROLLER: {Action.HEALTH},
    Role.ANONYMOUS: {Action.HEALTH},
    Role.OPEN: set(Action),
}


def caller(role: Role, node: str = "") -> Principal:
    return Principal(name="x", role=role, node=node, why="shown nothing")


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("action", Action)
def test_each_role_may_do_its_own_and_nothing_else(role: Role, action: Action) -> None:
    verdict = authorise(caller(role), action)
    assert verdict.is_allowed == (action in MAY[role])
    assert bool(verdict.reason) != verdict.is_allowed, "a refusal says why"


@pytest.mark.parametrize("role", Role)
def test_what_stands_in_no_table_nobody_may_do(role: Role) -> None:
    verdict = authorise(caller(role), None)
    assert not verdict.is_allowed and verdict.reason


def test_every_method_of_every_service_has_a_role_and_nothing_else_does() -> None:
    """Who adds a method says here who may call it: until then nobody may."""
    files = (control_pb2, operator_pb2, status_pb2, health_pb2, reflection_pb2)
    served = {
        f"/{service.full_name}/{method.name}"
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    newer = {"/grpc.health.v1.Health/List"}  # of later releases of the health service
    assert served | newer == set(METHODS)


def test_a_refusal_names_the_role_that_it_takes() -> None:
    verdict = authorise(principal_of_token(Role.VIEWER, "ann", ""), Action.ACT)
    assert "role operator" in verdict.reason and "viewer/ann" in verdict.reason


@pytest.mark.parametrize(
    ("who", "is_allowed"),
    [
        (caller(Role.AGENT, "a"), True),
        (caller(Role.AGENT, "b"), False),
        (caller(Role.AGENT), False),
        (caller(Role.OPERATOR), False),
        (caller(Role.VIEWER), False),
        (caller(Role.ANONYMOUS), False),
        (caller(Role.OPEN), True),
    ],
)
def test_an_agent_speaks_for_its_own_node_only(who: Principal, is_allowed: bool) -> None:
    assert authorise_attach(who, "a").is_allowed == is_allowed


def known(uris: list[str], names: list[str] | None = None, by_dns: bool = False) -> Principal:
    return principal_of_certificate(uris, names or [], "fleet", by_dns)


@pytest.mark.parametrize(
    ("uri", "role", "node"),
    [
        ("spiffe://fleet/node/gpu-7", Role.AGENT, "gpu-7"),
        ("spiffe://fleet/operator/ann", Role.OPERATOR, ""),
        ("spiffe://fleet/viewer/bob", Role.VIEWER, ""),
    ],
)
def test_an_identity_tells_role_and_node(uri: str, role: Role, node: str) -> None:
    found = known([uri, "https://elsewhere/x"])
    assert (found.role, found.node) == (role, node)


@pytest.mark.parametrize(
    "uris",
    [
        [],
        ["spiffe://other/node/gpu-7"],
        ["spiffe://fleet.evil/node/gpu-7"],
        ["spiffe://fleet/node/"],
        ["spiffe://fleet/root/ann"],
        ["spiffe://fleet/operator/ann", "spiffe://fleet/node/gpu-7"],
        ["spiffe://fleet/node/\x1b[2J"],
    ],
)
def test_what_is_not_one_identity_of_this_fleet_is_nobody(uris: list[str]) -> None:
    assert known(uris).role is Role.ANONYMOUS


def test_a_dns_name_is_a_node_where_it_was_said_so_and_nothing_else_is_told() -> None:
    assert known([], ["gpu-7"]).role is Role.ANONYMOUS
    assert known([], ["gpu-7"], by_dns=True) == known(["spiffe://fleet/node/gpu-7"])
    assert known([], ["gpu-7", "gpu-8"], by_dns=True).role is Role.ANONYMOUS
    assert known(["spiffe://other/x"], ["gpu-7"], by_dns=True).role is Role.ANONYMOUS


def test_a_token_speaks_for_its_bearer_unless_the_certificate_is_of_another_node() -> None:
    node = known(["spiffe://fleet/node/a"])
    operator = principal_of_token(Role.OPERATOR, "ann", "")
    assert combine(operator, node) is operator
    assert combine(principal_of_token(Role.AGENT, "a", "a"), node).node == "a"
    assert combine(principal_of_token(Role.AGENT, "b", "b"), node).role is Role.ANONYMOUS
    assert combine(principal_of_token(Role.AGENT, "b", "b"), None).node == "b"


def test_a_bad_token_is_no_better_for_a_good_certificate() -> None:
    node = known(["spiffe://fleet/node/a"])
    assert combine(anonymous("expired"), node).role is Role.ANONYMOUS


def test_who_is_open_by_name_only_is_not_given_away() -> None:
    with pytest.raises(AssertionError):
        principal_of_token(Role.OPEN, "x", "")
    assert rbac.ALLOWED.reason == ""
