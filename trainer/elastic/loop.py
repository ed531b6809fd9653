"""The training loop of one rank's process: steps, agreed moves, and regrouping after a death.

The process never restarts: a broken generation is left, the survivors agree, and the open step is
committed or done again with the same samples.
"""

import contextlib
import ctypes
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from pacekeeper.core.errors import ExitCode, PacekeeperError, UnreachableError
from pacekeeper.core.incidents.rank_ranges import format_ranks
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.resize.shrink import RecoveryPlan
from pacekeeper.trainer.elastic.agreement.consensus import Agreement, AllDone, Fenced
from pacekeeper.trainer.elastic.agreement.kv_store import Stores
from pacekeeper.trainer.elastic.agreement.messages import ConsensusDecision, Report, widened
from pacekeeper.trainer.elastic.agreement.recovery_decision import RecoverySources, plan_recovery
from pacekeeper.trainer.elastic.joining import admission
from pacekeeper.trainer.elastic.launch_spec import RankSpec
from pacekeeper.trainer.groups.group import PeerLost
from pacekeeper.trainer.groups.waiting import WaitLimits

if TYPE_CHECKING:
    from pacekeeper.trainer.elastic.engine_worker import EngineWorker  # imports transformers


MAX_ATTEMPTS = 8  # to form a group of the same ranks, before it is called impossible
_PR_SET_PDEATHSIG = 1
LEFT_BEHIND = 75  # the exit code of a rank the others went on without (EX_TEMPFAIL)
_COLLECT_PERIOD_STEPS = 50
_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFailure:
    """What is left of a PeerLost: its frames would hold the dead group's collectives."""

    why: str
    is_silence: bool = False


def rank_main(spec: RankSpec) -> None:
    """Be one rank: the main function of its process, ended with one of the product's exit codes."""
    _die_with_parent()
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s rank={spec.rank} %(message)s",
        stream=sys.stderr,
        force=True,
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface_of(spec.stores[spec.node_of[spec.rank]]))
    from pacekeeper.trainer.elastic.engine_worker import EngineWorker  # imports transformers

    try:
        train(spec, EngineWorker)
    except Fenced as error:
        _log.error("%s", error)
        _leave(LEFT_BEHIND)
    except PacekeeperError as error:
        _log.error("%s", error)
        _leave(int(error.exit_code))
    except Exception:
        _log.exception("a bug ended this rank")
        _leave(int(ExitCode.INTERNAL))
    _leave(int(ExitCode.OK))


def train(
    spec: RankSpec,
    make: Callable[..., "EngineWorker"],
    *,
    stop_signals: Collection[signal.Signals] = (signal.SIGTERM,),
    on_step: Callable[["EngineWorker"], None] | None = None,
) -> "EngineWorker":
    """Train until `config.steps` are committed, whatever happens to the others.

    Args:
        spec: Of this rank.
        make: Makes the worker, of `spec` and `is_asked_to_stop`.
        stop_signals: Which ask to end.
        on_step: Called after each committed step (tests).

    Raises:
        LostStateError: An expert has no living replica rank.
        Fenced: The others went on without this rank.
        NoQuorumError: The others may have.
        UnreachableError: Another rank is lost, under torchrun.
    """
    # First of all: a request to end that comes while the model is made is followed after a step.
    requests: list[int] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides
    for one in stop_signals:
        signal.signal(one, lambda number, _: requests.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals)
    rank = make(spec=spec, is_asked_to_stop=lambda: bool(requests))
    # A collection in mid-step would look like a fault of this rank. It takes a while: who waits to
    # be let in is ready after it.
    gc.collect()
    gc.freeze()
    gc.disable()
    stores = Stores(spec.stores, key=spec.key, prefix=spec.store_prefix)
    verdict = admission.await_admission(rank, stores) if spec.is_newcomer else None
    if spec.is_newcomer and verdict is None:
        return rank  # asked to end before it was let in
    rank.attach()
    agreement = Agreement(
        stores=stores,
        rank=spec.rank,
        node_of=rank.spec.node_of,
        timeout_s=spec.config.peer_timeout_s,
        start_s=spec.config.start_timeout_s,
        known_dead=rank.hooks.dead_ranks,
    )
    lost = _begin(rank, stores, agreement, verdict)
    stores.answer_s = agreement.timeouts.answer_s  # while all start at once they may be slower
    is_over = lost is None and rank.step >= spec.config.steps
    while True:
        if lost is not None:
            if spec.store_prefix:
                raise UnreachableError(f"another rank is lost: {lost.why}")
            if is_over and agreement.has_finished_member(rank.group):
                break
            try:
                _regroup(rank, stores, agreement, lost)
            except AllDone:
                break
            is_over = rank.step >= spec.config.steps
        if is_over:
            # Nobody leaves before all have committed the last step.
            _, lost = _attempt(rank, rank.finish)
            if lost is None:
                break
            continue
        was_last, lost = _attempt(rank, lambda: _advance(rank))
        if lost is not None:
            continue
        is_over = bool(was_last)
        if on_step is not None:
            on_step(rank)
        if rank.step % _COLLECT_PERIOD_STEPS == 0:
            gc.collect()
    agreement.finish(rank.group)
    # Nobody waits for this rank any more: it may take its time with the last checkpoint.
    rank.save(is_storing=False, is_last=True)
    rank.end_saves()
    rank.hooks.detach()
    rank.close()
    return rank


def _advance(rank: "EngineWorker") -> bool:
    """One step, its check, and what its votes agreed on (probe, move). True: it was the last."""
    ballot = rank.do_step()
    period = rank.spec.config.replica_check_period_steps
    earlier = rank.check_replicas() if period and rank.step % period == 0 else None
    if earlier is not None:
        _go_back(rank, earlier)
        return False
    rank.after_step()
    if ballot.is_stopping or rank.step >= rank.spec.config.steps:
        return True  # what a run ends with is saved when all are at its end
    rank.save(is_storing=ballot.is_storing, is_copying=ballot.is_copying)
    generation = ballot.agreed_generation
    has_frozen = rank.checkpoints.is_replaying()  # then nobody comes in, and nothing moves
    if ballot.opens and not has_frozen:
        raise PeerLost("nodes wait to join: all leave, to come back with them")
    if ballot.agreed_probe is not None:
        rank.do_probe(ballot.agreed_probe)
    if generation is not None and not has_frozen:
        wanted = rank.offered_layout()
        assert wanted is not None, "an agreed plan was read by every rank"
        assert wanted.generation == generation, "the crc was part of the vote"
        began_s = time.monotonic()
        moved_bytes = rank.do_move(wanted)
        took_s = time.monotonic() - began_s
        rank.enter(is_regroup=False, moved_bytes=moved_bytes, took_s=took_s)
        _log.info("step=%d generation=%d took %.3f s", rank.step, generation, took_s)
    return False


def _go_back(rank: "EngineWorker", plan: RecoveryPlan) -> None:
    """Go over to an earlier state with the present members. Raises PeerLost."""
    began_s = time.monotonic()
    moved_bytes = rank.do_restore(plan.restore, plan.layout)
    took_s = time.monotonic() - began_s
    rank.enter(is_regroup=True, moved_bytes=moved_bytes, took_s=took_s)
    _log.info("step=%d generation=%d restored", rank.step, plan.layout.generation)


def _attempt(rank: "EngineWorker", action: Callable[[], T]) -> tuple[T | None, GroupFailure | None]:
    """The action's result, or why the group was lost in it."""
    try:
        try:
            return action(), None
        except (PeerLost, PacekeeperError):
            raise
        except Exception:
            rank.check_groups()  # collectives that a loss aborted may have left garbage
            raise
    except PeerLost as error:
        return None, GroupFailure(why=str(error), is_silence=error.is_silence)


def _begin(
    rank: "EngineWorker", stores: Stores, agreement: Agreement, verdict: ConsensusDecision | None
) -> GroupFailure | None:
    """Form generation 1 and resume, or come in by the `verdict`; the loss where that failed."""
    if verdict is not None:
        agreement.belong_to(rank.group)
        return _settle(rank, stores, agreement, verdict, time.monotonic())

    def resume() -> None:
        _form(rank, stores, agreement)
        rank.resume()

    _, lost = _attempt(rank, resume)
    if lost is None:
        rank.enter(is_regroup=False, moved_bytes=0, took_s=0.0)
        admission.publish_job_facts(rank, stores)
    return lost


def _form(rank: "EngineWorker", stores: Stores, agreement: Agreement) -> None:
    """Form the groups of the members, their addresses in the store of the lowest member's node."""
    group = rank.group
    node = rank.spec.node_of[group.members[0]]
    store = stores.dedicated_client(node)
    if store is None:
        raise PeerLost(f"the store of node {node} is gone")
    silence_s = agreement.timeouts.wait_s
    limits = WaitLimits(
        tick_s=rank.spec.config.tick_s,
        timeout_s=silence_s,
        arrive_s=admission.arrival_timeout_s(rank, silence_s),
        answer_s=stores.answer_s,
    )
    try:
        rank.form(
            store.unsigned if rank.spec.store_prefix else store,
            limits,
            lambda: admission.has_lost_newcomers(rank, stores) or agreement.is_left(group),
        )
    except PeerLost:
        stores.leave_dedicated_client(node)
        raise


def _regroup(
    rank: "EngineWorker", stores: Stores, agreement: Agreement, lost: GroupFailure
) -> None:
    """Leave the broken generation; agree, form the next one, move, and stand ready to go on.

    A death in the middle of this is one more broken generation: it starts over with the next one.
    """
    began_s = time.monotonic()
    attempts = 0
    while True:
        generation, members = rank.group.generation, rank.group.members
        _log.info("step=%d left generation %d: %s", rank.step, generation, lost.why)
        rank.leave()
        verdict = _agree(rank, agreement, lost)
        admission.admit(rank, stores, verdict)
        agreement.node_of = rank.spec.node_of
        agreement.belong_to(verdict.group)
        rank.group = verdict.group
        if rank.spec.rank in verdict.commits:
            rank.commit(loss=verdict.last_loss, is_applied=verdict.was_applied)
        else:
            rank.give_up_part()
        attempts = attempts + 1 if verdict.members == members else 0
        if attempts > MAX_ATTEMPTS:
            raise PacekeeperError(
                f"ranks {format_ranks(members)} live but formed no group {attempts} times: "
                f"{lost.why}",
                remedy="can they reach each other? GLOO_SOCKET_IFNAME names the interface to use",
            )
        next_loss = _settle(rank, stores, agreement, verdict, began_s)
        if next_loss is None:
            return
        lost = next_loss


def _settle(
    rank: "EngineWorker",
    stores: Stores,
    agreement: Agreement,
    verdict: ConsensusDecision,
    began_s: float,
) -> GroupFailure | None:
    """Form the agreed group, move in, stand ready to go on; the loss where that failed."""
    moved_bytes, lost = _attempt(rank, partial(_move_in, rank, stores, agreement, verdict))
    if lost is not None:
        return lost
    took_s = time.monotonic() - began_s
    rank.enter(is_regroup=True, moved_bytes=moved_bytes or 0, took_s=took_s)
    admission.publish_job_facts(rank, stores)
    _log.info(
        "step=%d generation=%d ranks=%s regrouped in %.3f s",
        rank.step,
        rank.group.generation,
        list(rank.group.members),
        took_s,
    )
    return None


def _move_in(
    rank: "EngineWorker", stores: Stores, agreement: Agreement, verdict: ConsensusDecision
) -> int:
    """Form the group and go over to its layout, or back to a checkpoint; bytes sent and read."""
    _form(rank, stores, agreement)
    if verdict.restore and not verdict.only_lost:
        moved_bytes = rank.do_restore(verdict.restore, verdict.layout)
    else:
        moved_bytes = rank.do_move(verdict.layout, verdict.restore)
    return moved_bytes


def _agree(rank: "EngineWorker", agreement: Agreement, lost: GroupFailure) -> ConsensusDecision:
    group, candidates = rank.group, admission.candidates(rank)

    def base(commits: bool) -> Layout:
        moved = rank.pending_layout if commits else None
        return rank.layout if moved is None else moved

    def next_layout(commits: bool, dead: frozenset[int], new_generation: int) -> RecoveryPlan:
        layout = base(commits)
        has_begun = rank.has_entered or layout is not rank.layout
        # Who is no member any more died in an earlier generation that never got its move done; who
        # is one and has no part in the layout joined in such a one.
        staying = (set(group.members) - dead).union(*(one.ranks for one in candidates))
        node_of, _ = widened(rank.spec.node_of, rank.spec.stores, candidates)
        return plan_recovery(
            layout,
            staying,
            generation=new_generation,
            floor=rank.floor(len(staying), node_of),
            has_begun=has_begun,
            has_frozen=rank.checkpoints.is_replaying(commits=commits),
            means=RecoverySources(
                sources=rank.checkpoints.sources,
                is_partial=rank.checkpoints.partial.is_on,
            ),
            state_bytes=rank.state_bytes,
        )

    offered = rank.hooks.ring.command().plan_generation
    report = Report(
        progress=rank.progress,
        newest_generation=max(group.generation, rank.layout.generation, offered),
        last_loss=rank.last_loss,
        was_applied=rank.was_applied,
        was_silence=lost.is_silence,
        step=rank.step,
    )
    return agreement.reach(
        group=group, report=report, next_layout=next_layout, candidates=candidates, base=base
    )


def _die_with_parent() -> None:
    """A rank without its supervisor would go on unwatched: end with it.

    The parent in the kernel's eyes is the forkserver, which lives as long as any rank does.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    supervisor = multiprocessing.parent_process()
    if supervisor is not None:
        threading.Thread(target=_die_after, args=(supervisor,), daemon=True).start()


def _die_after(supervisor: multiprocessing.process.BaseProcess) -> None:
    supervisor.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _interface_of(address: str) -> str:
    """Loopback for a job on loopback; otherwise gloo finds the interface by the host name."""
    return "lo" if address.startswith("127.") else os.environ.get("GLOO_SOCKET_IFNAME", "")


def _leave(code: int) -> None:
    """End the process now: atexit of a half-dead group may wait for peers that are gone."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
