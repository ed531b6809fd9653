"""Role-based access control: principals, actions, one table. A method in no table is rejected.

A caller is identified by certificate or token. A controller that requires neither (on loopback, or
with `insecure`) treats every caller as the operator of its host.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pacekeeper.core.telemetry.attachment import is_node_name

_SCHEME = "spiffe://"


class Role(StrEnum):
    """The role of a caller."""

    VIEWER = "viewer"  # reads everything
    OPERATOR = "operator"  # reads everything and acts
    AGENT = "agent"  # reports for its own node, and reads nothing
    CONTROLLER = "controller"  # a standby, with a replica of the leader's store
    OPEN = "open"  # any caller, where none has to authenticate
    ANONYMOUS = "anonymous"  # has to authenticate, and did not


class Action(StrEnum):
    """The kinds of calls that roles are granted."""

    ATTACH = "attach"
    READ = "read"
    ACT = "act"
    HEALTH = "health"


_GRANTS: Mapping[Role, frozenset[Action]] = {
    Role.VIEWER: frozenset({Action.READ, Action.HEALTH}),
    Role.OPERATOR: frozenset({Action.READ, Action.ACT, Action.HEALTH}),
    Role.AGENT: frozenset({Action.ATTACH, Action.HEALTH}),
    Role.CONTROLLER: frozenset({Action.HEALTH}),
    Role.OPEN: frozenset(Action),
    Role.ANONYMOUS: frozenset({Action.HEALTH}),
}
_STATUS = "/pacekeeper.v1.StatusService/"
_OPERATOR = "/pacekeeper.v1.OperatorService/"
METHODS: Mapping[str, Action] = {
    "/pacekeeper.v1.AgentControlService/Attach": Action.ATTACH,
    "/pacekeeper.v1.AgentControlService/FetchLayout": Action.ATTACH,
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
    "/grpc.health.v1.Health/Check": Action.HEALTH,
    "/grpc.health.v1.Health/Watch": Action.HEALTH,
    "/grpc.health.v1.Health/List": Action.HEALTH,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Action.READ,
}
"""Each method of each service; a test compares this with the services."""

_ROLE_OF_PATH = {
    "node": Role.AGENT,
    "viewer": Role.VIEWER,
    "operator": Role.OPERATOR,
    "controller": Role.CONTROLLER,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """An identified caller.

    Attributes:
        name: For people and the audit log.
        role: What it may do.
        node: Of an agent, the only node it may report for; otherwise empty.
        why: Of an anonymous caller, why its credentials were not accepted.
    """

    name: str
    role: Role
    node: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessDecision:
    """Whether an action is allowed; `reason`: why it is not."""

    is_allowed: bool
    reason: str = ""


ALLOWED = AccessDecision(is_allowed=True)


def anonymous(why: str, name: str = "") -> Principal:
    """A caller without accepted credentials. `why`: the reason; `name`: who it claims to be."""
    return Principal(name=name or Role.ANONYMOUS, role=Role.ANONYMOUS, why=why)


def authorise(principal: Principal, action: Action | None) -> AccessDecision:
    """Whether a principal may do an action; None: a method that is in no table."""
    if action is None:
        return _rejected("no role may call this method")
    if action in _GRANTS[principal.role]:
        return ALLOWED
    if principal.role is Role.ANONYMOUS:
        return _rejected(principal.why)
    able = [role for role, granted in _GRANTS.items() if action in granted]
    wanted = " or ".join(role for role in able if role not in (Role.OPEN, Role.ANONYMOUS))
    return _rejected(
        f"{action} requires the role {wanted}; {principal.name} has the role {principal.role}"
    )


def authorise_attach(principal: Principal, node: str) -> AccessDecision:
    """Whether a principal may report for a node: an agent may for its own only."""
    if principal.role is Role.OPEN or (principal.role is Role.AGENT and principal.node == node):
        return ALLOWED
    return _rejected(f"{principal.name} may not report for node {node!r}")


def principal_of_certificate(
    uris: Sequence[str], names: Sequence[str], domain: str, by_dns: bool
) -> Principal:
    """The principal that a client certificate names.

    The identity is spiffe://DOMAIN/KIND/NAME, KIND being node, operator, viewer or controller. A
    certificate with more than one such identity is not accepted.

    Args:
        uris: URIs among the subject alternative names.
        names: DNS names among them.
        domain: The fleet's trust domain.
        by_dns: Whether the only DNS name of a certificate without URIs names a node.
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
    return anonymous(f"the certificate ({shown:.200}) has not exactly one identity of {domain!r}")


def principal_of_token(role: Role, name: str, node: str) -> Principal:
    """The principal of a valid token; `node`: that of an agent, otherwise empty."""
    assert role in (Role.VIEWER, Role.OPERATOR, Role.AGENT), "no other role has tokens"
    return Principal(name=f"{role}/{name} by token", role=role, node=node)


def combine(by_token: Principal, by_certificate: Principal | None) -> Principal:
    """The principal of a call with token and certificate: the token's, if their nodes agree."""
    certified = "" if by_certificate is None else by_certificate.node
    if by_token.node and certified and by_token.node != certified:
        return anonymous(
            f"the token is of node {by_token.node!r}, the certificate of {certified!r}"
        )
    return by_token


def _known(role: Role, name: str, how: str) -> Principal:
    node = name if role is Role.AGENT else ""
    return Principal(name=f"{role}/{name} by {how}", role=role, node=node)


def _rejected(reason: str) -> AccessDecision:
    return AccessDecision(is_allowed=False, reason=reason)
