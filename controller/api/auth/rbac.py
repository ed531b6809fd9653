"""Who may do what: callers, actions, and one table. Pure; what stands in no table is refused.

A caller is known by its certificate or by a token, or it is nobody. Where a controller asks for
neither (on loopback, or told so by `insecure`), everybody is the operator of this host.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pacekeeper.core.telemetry.attachment import is_node_name

_SCHEME = "spiffe://"


class Role(StrEnum):
    """What a caller is to the fleet."""

    VIEWER = "viewer"  # sees all
    OPERATOR = "operator"  # sees all and acts
    AGENT = "agent"  # reports of its own node, and sees nothing
    CONTROLLER = "controller"  # stands by, with a copy of the leader's store
    OPEN = "open"  # nobody is asked who he is
    NOBODY = "nobody"  # was asked, and has shown nothing that counts


class Action(StrEnum):
    """What the methods of the services come to."""

    ATTACH = "attach"
    READ = "read"
    ACT = "act"
    HEALTH = "health"
    FOLLOW = "follow"


_GRANTS: Mapping[Role, frozenset[Action]] = {
    Role.VIEWER: frozenset({Action.READ, Action.HEALTH}),
    Role.OPERATOR: frozenset({Action.READ, Action.ACT, Action.HEALTH}),
    Role.AGENT: frozenset({Action.ATTACH, Action.HEALTH}),
    Role.CONTROLLER: frozenset({Action.FOLLOW, Action.HEALTH}),
    Role.OPEN: frozenset(Action),
    Role.NOBODY: frozenset({Action.HEALTH}),
}
_STATUS = "/pacekeeper.v1.StatusService/"
_OPERATOR = "/pacekeeper.v1.OperatorService/"
METHODS: Mapping[str, Action] = {
    "/pacekeeper.v1.AgentControlService/Attach": Action.ATTACH,
    f"{_STATUS}ListJobs": Action.READ,
    f"{_STATUS}GetJob": Action.READ,
    f"{_STATUS}ListNodes": Action.READ,
    f"{_STATUS}ListIncidents": Action.READ,
    f"{_STATUS}ListProposals": Action.READ,
    f"{_STATUS}WatchIncidents": Action.READ,
    f"{_STATUS}WatchSteps": Action.READ,
    f"{_STATUS}GetLayout": Action.READ,
    f"{_STATUS}GetExplanation": Action.READ,
    f"{_STATUS}GetPace": Action.READ,
    f"{_STATUS}ListOrders": Action.READ,
    f"{_OPERATOR}ApproveProposal": Action.ACT,
    f"{_OPERATOR}DenyProposal": Action.ACT,
    f"{_OPERATOR}GiveOrder": Action.ACT,
    "/pacekeeper.v1.ReplicationService/Follow": Action.FOLLOW,
    "/grpc.health.v1.Health/Check": Action.HEALTH,
    "/grpc.health.v1.Health/Watch": Action.HEALTH,
    "/grpc.health.v1.Health/List": Action.HEALTH,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Action.READ,
}
"""Each method of each service that is served; tests hold this against the services."""

_ROLE_OF_PATH = {
    "node": Role.AGENT,
    "viewer": Role.VIEWER,
    "operator": Role.OPERATOR,
    "controller": Role.CONTROLLER,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who calls. `node`: of an agent, the only one it may speak for; of others empty.

    `name` is for people and the audit log; `why`: of nobody, what was wrong with what it showed.
    """

    name: str
    role: Role
    node: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessDecision:
    """Whether an action may be done, and why not."""

    is_allowed: bool
    reason: str = ""


ALLOWED = AccessDecision(is_allowed=True)
OPEN_AT = "open at "  # and the address: all that is known of callers where nobody is asked


def anonymous(why: str, name: str = "") -> Principal:
    """A caller who has shown nothing that counts."""
    return Principal(name=name or Role.NOBODY, role=Role.NOBODY, why=why)


def authorise(caller: Principal, action: Action | None) -> AccessDecision:
    """May this caller do that? None is an action that nobody has put into the table."""
    if action is None:
        return _refused("no role may call this method")
    if action in _GRANTS[caller.role]:
        return ALLOWED
    if caller.role is Role.NOBODY:
        return _refused(caller.why)
    able = [role for role, granted in _GRANTS.items() if action in granted]
    wanted = " or ".join(role for role in able if role not in (Role.OPEN, Role.NOBODY))
    return _refused(f"to {action} takes the role {wanted}; {caller.name} is {caller.role}")


def authorise_attach(caller: Principal, node: str) -> AccessDecision:
    """May this caller report of that node? An agent of its own only."""
    if caller.role is Role.OPEN or (caller.role is Role.AGENT and caller.node == node):
        return ALLOWED
    return _refused(f"{caller.name} may not report of node {node!r}")


def principal_of_certificate(
    uris: Sequence[str], names: Sequence[str], domain: str, by_dns: bool
) -> Principal:
    """The caller whose certificate has these URIs and DNS names among its alternative names.

    spiffe://DOMAIN/KIND/NAME, where KIND is node, operator, viewer or controller. More than one
    identity is none. `by_dns`: whether the one DNS name of a certificate without any URI
    is a node.
    """
    ours = [uri for uri in uris if uri.startswith(f"{_SCHEME}{domain}/")]
    shown = ", ".join([*uris, *names]) or "no names"
    if len(ours) == 1:
        kind, _, name = ours[0].removeprefix(f"{_SCHEME}{domain}/").partition("/")
        role = _ROLE_OF_PATH.get(kind)
        if role is not None and is_node_name(name):
            return _known(role, name, "certificate")
    elif by_dns and not uris and len(names) == 1 and is_node_name(names[0]):
        return _known(Role.AGENT, names[0], "certificate")
    return anonymous(f"the certificate ({shown:.200}) tells no one identity of {domain!r}")


def principal_of_token(role: Role, name: str, node: str) -> Principal:
    """The caller that a valid token stands for."""
    assert role in (Role.VIEWER, Role.OPERATOR, Role.AGENT), "tokens are for these"
    return Principal(name=f"{role}/{name} by token", role=role, node=node)


def combine(by_token: Principal, by_certificate: Principal | None) -> Principal:
    """Who shows both: the token speaks, unless the two are of different nodes."""
    told = "" if by_certificate is None else by_certificate.node
    if by_token.node and told and by_token.node != told:
        return anonymous(f"the token is of node {by_token.node!r}, the certificate of {told!r}")
    return by_token


def _known(role: Role, name: str, how: str) -> Principal:
    node = name if role is Role.AGENT else ""
    return Principal(name=f"{role}/{name} by {how}", role=role, node=node)


def _refused(reason: str) -> AccessDecision:
    return AccessDecision(is_allowed=False, reason=reason)
