"""How members let newcomers in, and how a newcomer's rank comes in: what is said, what is known.

When they come in is decided by the agreement (trainer/elastic/agreement/consensus.py), what they
get by the mover.
"""

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pacekeeper.core.config.engine import PATHS, EngineConfig
from pacekeeper.core.errors import UnreachableError
from pacekeeper.trainer.elastic.agreement.consensus import Fenced
from pacekeeper.trainer.elastic.agreement.kv_store import Stores
from pacekeeper.trainer.elastic.agreement.messages import (
    ADMISSION_KEY,
    JOB_KEY,
    Candidate,
    ConsensusDecision,
    JobFacts,
    decode_admission,
    encode_admission,
    read_verdict,
    ready_key,
    widened,
)
from pacekeeper.trainer.elastic.agreement.quorum import FIRST_GROUP
from pacekeeper.trainer.elastic.joining.join_queue import JoinQueue

if TYPE_CHECKING:
    from pacekeeper.trainer.elastic.engine_worker import EngineWorker  # imports transformers


POLL_S = 0.02
ARRIVAL_S = 10.0  # for newcomers, which were ready: they cost the members no more than this
NUM_TELLERS = 3  # members that tell them: so many minus one may die at once


def await_admission(rank: "EngineWorker", stores: Stores) -> ConsensusDecision | None:
    """Wait to be let in, and stand where the members stand; None where asked to end first.

    Raises Fenced where the members went on without this rank meanwhile, UnreachableError where its
    launcher is gone.
    """
    own = _node(rank)
    stores.write(own, ready_key(rank.spec.rank), str(rank.data_crc))
    while not rank.is_asked_to_stop():
        text = stores.read(own, ADMISSION_KEY)
        if text is not None:
            return _come_in(rank, stores, text)
        if own in stores.gone:
            raise UnreachableError(f"the store of its own node, {own}, does not answer")
        time.sleep(POLL_S)
    return None


def _come_in(rank: "EngineWorker", stores: Stores, text: str) -> ConsensusDecision:
    group, said, facts = decode_admission(text)
    verdict = read_verdict(group, said)
    assert verdict.base is not None, "a verdict with newcomers says what the members hold"
    if rank.spec.rank not in verdict.members:
        raise Fenced(f"the others did not count on rank {rank.spec.rank}")
    rank.spec = replace(rank.spec, node_of=facts.node_of, stores=facts.addresses)
    stores.learn(facts.addresses)
    rank.group, rank.layout = verdict.group, verdict.base
    rank.ticket, rank.step = verdict.ticket, verdict.step
    rank.last_loss, rank.was_applied = verdict.last_loss, verdict.was_applied
    return verdict


def admit(rank: "EngineWorker", stores: Stores, verdict: ConsensusDecision) -> None:
    """Know the newcomers of a verdict on this rank's group, and tell them. Before it is followed.

    The launcher of this node learns of them, too: from the facts in its store.
    """
    if not verdict.newcomers:
        return
    node_of, addresses = widened(rank.spec.node_of, rank.spec.stores, verdict.newcomers)
    rank.spec = replace(rank.spec, node_of=node_of, stores=addresses)
    stores.learn(addresses)
    # With who was there: until this group stands the one before may, too.
    members = tuple(sorted({*rank.group.members, *verdict.members}))
    facts = _facts(rank, verdict.group.generation, members)
    stores.write(_node(rank), JOB_KEY, facts.encode())
    if rank.spec.rank in rank.group.members[:NUM_TELLERS]:
        text = encode_admission(rank.group, verdict.text, facts)
        for one in verdict.newcomers:
            stores.write_first(one.node, ADMISSION_KEY, text)


def publish_job_facts(rank: "EngineWorker", stores: Stores) -> None:
    """In a group that has just been entered: say who runs the job; the leader looks who waits."""
    members, node_of, own = rank.group.members, rank.spec.node_of, _node(rank)
    if rank.spec.rank == min(r for r in members if node_of[r] == own):
        facts = _facts(rank, rank.group.generation, members)
        stores.write(own, JOB_KEY, facts.encode())
    if rank.spec.rank in members[:NUM_TELLERS]:
        # Who looks for those that are silent finds a frozen node in the time for one answer.
        stores.call({node_of[member] for member in members})
    is_open = not rank.spec.store_prefix
    if is_open and rank.spec.rank == members[0] and rank.join_queue is None:
        rank.join_queue = JoinQueue(rank.spec.stores[own], rank.spec.key)
        rank.join_queue.open()


def arrival_timeout_s(rank: "EngineWorker", wait_s: float) -> float:
    """How long members of the group are waited for, where all others get `wait_s` to answer."""
    if rank.group.name == FIRST_GROUP:
        return max(rank.spec.config.start_timeout_s, wait_s)
    return min(ARRIVAL_S, wait_s) if _awaited(rank) else wait_s


def candidates(rank: "EngineWorker") -> tuple[Candidate, ...]:
    """Nodes that wait to join, as far as this rank knows: the leader does."""
    return () if rank.join_queue is None else rank.join_queue.candidates(rank.spec.node_of)


def has_lost_newcomers(rank: "EngineWorker", stores: Stores) -> bool:
    """While newcomers are awaited: is a node of theirs gone? Its launcher would be no one to say.

    Asked by few members for all.
    """
    if rank.group.has_stood or rank.spec.rank not in rank.group.members[:NUM_TELLERS]:
        return False
    nodes = _awaited(rank)
    stores.probe(nodes)
    return bool(nodes & stores.gone)


def _awaited(rank: "EngineWorker") -> set[int]:
    """Nodes of members that have no part in the layout yet."""
    fresh = set(rank.group.members) - set(rank.layout.ranks)
    return {rank.spec.node_of[other] for other in fresh}


def _node(rank: "EngineWorker") -> int:
    return rank.spec.node_of[rank.spec.rank]


def _facts(rank: "EngineWorker", generation: int, members: tuple[int, ...]) -> JobFacts:
    spec = rank.spec
    return JobFacts(
        run_id=spec.run_id,
        first_run_id=spec.first_run_id,
        generation=generation,
        config=_as_seen_elsewhere(spec.config),
        world_size=spec.world_size,
        addresses=tuple(spec.stores),
        node_of=spec.node_of,
        members=members,
        data_crc=rank.data_crc,
    )


def _as_seen_elsewhere(config: EngineConfig) -> EngineConfig:
    """With whole paths: a launcher that joins was started in a directory of its own."""

    def whole(path: str) -> str:
        is_path = path not in ("", "auto", "never") and "://" not in path
        return os.path.abspath(path) if is_path else path

    own = {name: getattr(config, name) for name in (*PATHS, "checkpoint_dir", "resume")}
    paths: dict[str, Any] = {
        name: tuple(map(whole, value)) if isinstance(value, tuple) else whole(value)
        for name, value in own.items()
    }
    return replace(config, **paths)
