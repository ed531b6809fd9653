"""A rank of an elastic job that trains a Hugging Face model with the engine.

Steps, moves and restores are prepared with the other members and committed after their vote. When
members are lost the same engine goes on in new groups, with what survives of each block.
"""

import logging
import math
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch._C._distributed_c10d import Store

from pacekeeper.core.config.engine import PATHS, EngineConfig
from pacekeeper.core.errors import ConfigError, CorruptStateError, HostError, PacekeeperError
from pacekeeper.core.kernel_laws.noise import DEVICE_NOISE, NO_NOISE
from pacekeeper.core.layout.codec import encode_layout, layout_crc
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Block, Layout
from pacekeeper.core.layout.replica_spread import DomainOf
from pacekeeper.core.layout.resize.shrink import RecoveryPlan, ReplicationFloor
from pacekeeper.core.telemetry.attachment import ENGINE_CAPABILITIES, Capability, Clock
from pacekeeper.core.telemetry.pair_probe import is_pairwise
from pacekeeper.core.telemetry.sign_of_life import LOADING, MOVING, WAITING
from pacekeeper.trainer.adapters.reporter import default_clock
from pacekeeper.trainer.checkpoint.async_writer import SaveResult
from pacekeeper.trainer.checkpoint.block_reader import Restored
from pacekeeper.trainer.checkpoint.manager import Checkpoints, Position, SaveVote
from pacekeeper.trainer.checkpoint.policies.partial_experts import MemoryRestore, PartialRestore
from pacekeeper.trainer.elastic.agreement.quorum import Group
from pacekeeper.trainer.elastic.agreement.two_phase_commit import Ballot, Phase, Vote
from pacekeeper.trainer.elastic.step_log import JobLog, StepLog
from pacekeeper.trainer.elastic.worker import NO_LOSS, Worker
from pacekeeper.trainer.emulation.engine_device import EngineDevice
from pacekeeper.trainer.emulation.faults import (
    COMPUTE_FAULT,
    LINK_FAULT,
    Burner,
    FaultInjector,
    Slowable,
)
from pacekeeper.trainer.engine.engine import Engine
from pacekeeper.trainer.engine.job import (
    announce,
    batch_of,
    emulate,
    engine_options,
    learning_rate,
    make_optimizer,
    model_shape,
    prepare_job,
    require_budget,
    warn_of_overruns,
)
from pacekeeper.trainer.engine.run_log import StepRecord
from pacekeeper.trainer.engine.values import PreparedMove, PreparedStep
from pacekeeper.trainer.groups.agreement import on_all_ranks, require_agreement
from pacekeeper.trainer.groups.devices import device_number, device_uuid
from pacekeeper.trainer.groups.elastic import Members
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.groups.former import Generation, TorchFormer, make_former
from pacekeeper.trainer.groups.probe import probe_pairs, run_probe
from pacekeeper.trainer.groups.typed_values import gather_values
from pacekeeper.trainer.groups.waiting import WaitLimits
from pacekeeper.trainer.hooks import hooks
from pacekeeper.trainer.hooks.compute_timers import CpuClock
from pacekeeper.trainer.model import library
from pacekeeper.trainer.model.checkpoint_reader import INDEX
from pacekeeper.trainer.parallel.layouts import state_sizes
from pacekeeper.trainer.parallel.replica_check import ReplicaGuard
from pacekeeper.trainer.plans.offers import Plan, read_offered_plan

_MOST_RETURNS = 3  # to the same checkpoint, for replicas that differ
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankVote:
    commit: Vote
    saves: SaveVote


@dataclass(kw_only=True)
class EngineWorker(Worker):
    """A worker of the engine. Use from one thread."""

    plan: Plan | None = None
    _generation: Generation | None = None
    _prepared: PreparedStep = field(init=False)
    _failure: Exception | None = None  # before the first step
    _export_error: Exception | None = None
    _ended_s: float = 0.0  # the step before
    _begun: int = -1  # the step that was last begun
    _is_redone: bool = False
    _busy_s: float = 0.0  # of the emulated device, before that step
    _burner: Burner | None = None

    def __post_init__(self) -> None:
        spec, config = self.spec, self.config
        ranks = tuple(range(spec.world_size))
        self.device = torch.device("cpu")
        if config.device == "cuda":
            self.device = torch.device("cuda", device_number(spec.rank, spec.node_of))
            torch.cuda.set_device(self.device)
        elif "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max((os.cpu_count() or 1) // self._ranks_on_node(), 1))
        self._former = TorchFormer(self.device) if spec.store_prefix else make_former(self.device)
        self.steps = StepLog(spec.run_dir, spec.rank, is_continued=spec.first_run_id > 0)
        self.job_log = JobLog(config, Path(spec.run_dir))
        self.replica_guard = ReplicaGuard()
        self.emulated: EngineDevice | None = None
        # What is wrong here may be wrong on this node only: all members hear of it in `resume`.
        try:
            self._build(ranks)
        except Exception as error:  # out of memory, say: the others must not train without it
            if spec.is_newcomer:
                raise
            self._failure = error
            self.layout = even_layout(ranks=ranks, num_layers=1, num_experts=0, replicas=1)
        self.group = Group.first(self.layout.generation, ranks)

    def _ranks_on_node(self) -> int:
        node_of = self.spec.node_of
        return list(node_of.values()).count(node_of[self.spec.rank])

    def _build(self, ranks: tuple[int, ...]) -> None:
        spec, config = self.spec, self.config
        ranks_on_node = self._ranks_on_node()
        self.job = prepare_job(config, ranks, spec.node_of)
        if spec.rank == ranks[0]:
            announce(config, self.job, self.device, ranks_on_node)
        require_budget(config, self.job, spec.rank, self.device, ranks_on_node)
        self.job_log.has_evaluation = self.job.evaluation is not None
        self.layout = self.job.layout
        self.engine = Engine(
            self.job.skeleton,
            self.job.source,
            layout=self.layout,
            rank=spec.rank,
            options=engine_options(config, self.job, self.device),
        )
        self.engine.add_facts({"data": self.job.data} | self._settings())
        self.optimizer = make_optimizer(config, self.engine)
        self.engine.add_optimizer(self.optimizer)
        self.faults: FaultInjector | None = None
        targets: dict[str, Slowable] = {}
        if config.emulate:
            law = DEVICE_NOISE if config.emulated_noise else NO_NOISE
            self.emulated = EngineDevice.seeded(config.seed * 1000 + spec.rank, law)
            shapes = emulate(config, self.job, self.emulated, is_announced=spec.rank == ranks[0])
            self.engine.add_facts({"emulated model": library.config_values(shapes.module)})
            targets = {COMPUTE_FAULT: self.emulated, LINK_FAULT: self.emulated.links}
        elif spec.faults_dir and self.device.type == "cpu":
            self._burner = Burner()
            targets = {COMPUTE_FAULT: self._burner}
        if spec.faults_dir and targets:
            self.faults = FaultInjector(
                directory=Path(spec.faults_dir), rank=spec.rank, targets=targets
            )
        self.checkpoints = Checkpoints(
            config,
            rank=spec.rank,
            run_id=spec.run_id,
            first_run_id=spec.first_run_id or spec.run_id,
            identity=self.engine.fingerprint(data=self.job.data[0], settings=self._steering()),
            states=self.engine.states,
            note=self.steps.write,
        )

    @property
    def config(self) -> EngineConfig:
        """The settings."""
        return self.spec.config

    @property
    def data_crc(self) -> int:
        """What identifies the training data."""
        return 0 if self._failure else zlib.crc32(repr(self.engine.facts).encode())

    def _steering(self) -> dict[str, object]:
        """Settings that numbers depend on, beside the model and the data."""
        config = self.config
        names = ("seed", "rows_per_step", "row_tokens", "separate_documents", "learning_rate")
        more = ("warmup_steps", "decay", "final_ratio", "beta1", "beta2", "eps", "weight_decay")
        last = ("max_grad_norm", "precision", "balance_weight", "balance", "bias_rate", "steps")
        return {name: getattr(config, name) for name in (*names, *more, *last)}

    def floor(self, num_living: int, domain_of: DomainOf) -> ReplicationFloor:
        """Return the replicas that survivors restore of every expert."""
        self._raise_failure()
        return ReplicationFloor(
            replicas=min(self.config.replicas, num_living),
            domain_of=domain_of,
            slots_per_rank=self.engine.store.num_slots,
            are_slots_fixed=True,
        )

    @property
    def state_bytes(self) -> Mapping[Block, int]:
        """The size of each dense block's optimizer state, in any unit."""
        return state_sizes(self.job.skeleton)

    def attach(self) -> None:
        """Attach to the agent of the node, as a member or nearly one."""
        spec = self.spec
        clock, timer = default_clock(self.device)
        if self.emulated is not None:
            clock, timer = Clock.EMULATED, self.emulated
        elif self._burner is not None:
            timer = CpuClock(burn=self._burner)
        self.hooks = hooks.attach(
            job=self.config.job,
            rank=spec.rank,
            world_size=max(spec.world_size, spec.rank + 1),
            ring_dir=spec.ring_dir,
            clock=clock,
            device_uuid=device_uuid(self.device),
            timer=timer,
            model=None
            if self._failure
            else model_shape(self.config, self.job, self.engine, self._ranks_on_node()),
            run_id=spec.run_id,
            can_probe=True,
            capabilities=ENGINE_CAPABILITIES - self._impossible(),
        )
        if self._failure is None:
            self.engine.watch(self.hooks, time_transfers=self.config.time_transfers)

    def _impossible(self) -> frozenset[Capability]:
        """What this job cannot do: the emulated device has no gradients of weights apart."""
        is_fixed = self.config.checkpoint_activations or self.emulated is not None
        return frozenset({Capability.SCHEDULE} if is_fixed else ())

    def form(self, store: Store, limits: WaitLimits, is_aborted: Callable[[], bool]) -> None:
        """Form the process groups of `group`, which meet in `store`. Raises PeerLost."""
        own, group = self.spec.rank, self.group
        members = Members(
            store, group.name, own, group.members, is_aborted=is_aborted, limits=limits
        )
        members.waiting = self.hooks.waits_of_this_thread()
        self._generation = self._former.form(members)

    @property
    def generation(self) -> Generation:
        """The process groups that this rank is in."""
        assert self._generation is not None, "formed before the first step"
        return self._generation

    def resume(self) -> None:
        """In the first group: compare the data, restore what is to be resumed. Raises PeerLost."""
        control = self.generation.groups.control
        require_agreement(self._settings(), control)
        on_all_ranks(self._raise_failure, control)
        require_agreement({"data": self.job.data}, control)
        self.engine.enter(self.generation.groups)
        paths = self.checkpoints.agree_on_start(control)
        if paths:
            self.do_restore(paths, self.layout)
        on_all_ranks(self._open_log, control)

    def _settings(self) -> dict[str, object]:
        """Settings that must be equal on all ranks, by their names in messages."""
        places = {*PATHS, "checkpoint_dir", "resume"}
        settings = {name: v for name, v in asdict(self.config).items() if name not in places}
        settings["export_dir, if any"] = bool(self.config.export_dir)
        return {f"[engine] {name}": value for name, value in settings.items()}

    def _open_log(self) -> None:
        if self.spec.rank == self.group.members[0]:
            self.job_log.lead(self.step)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def leave(self) -> None:
        """Leave the process groups, if there are any."""
        self.hooks.ring.enter_phase(WAITING)  # until a step begins
        if self._generation is not None:
            self._generation.abort()
            self._generation = None
            if self._failure is None:
                self.checkpoints.snapshots.leave()

    def check_groups(self) -> None:
        """Raise PeerLost if a loss in the process groups may have left garbage."""
        if self.device.type == "cuda" and self._generation is not None:
            self._generation.check()

    def close(self) -> None:
        """End in peace: nobody needs the process groups any more."""
        self.job_log.close()
        if self.emulated is not None:
            warn_of_overruns(self.emulated, self.spec.rank)
        if self._export_error is not None:
            raise self._export_error

    def finish(self) -> None:
        """After the last step: do what is left to do together; all end together.

        It may be called again after PeerLost, with fewer members.
        """
        folder, control = self.config.export_dir, self.generation.groups.control
        self._evaluate_last_step()
        # At the start there was none: it is of this run, written before some rank was lost.
        is_there = bool(folder) and (Path(folder) / INDEX).exists()
        if folder and self.step >= self.config.steps:
            try:
                if not control.all_gather(torch.tensor([is_there])).any():
                    with self.hooks.saving():
                        self.engine.export(folder)
                if self.spec.rank == control.ranks[0]:
                    _log.info("exported to %s", folder)
            except PacekeeperError as error:  # on all ranks; the last checkpoint is saved first
                self._export_error = error
        control.all_gather(torch.zeros(1))

    def enter(self, *, is_regroup: bool, moved_bytes: int, took_s: float) -> None:
        """Train on `layout` from the current step on; report it."""
        self.plan, self.has_entered = None, True
        self.group = self.group.standing()
        generation, node_of, own = self.layout.generation, self.spec.node_of, self.spec.rank
        on_node = [r for r in self.group.members if node_of[r] == node_of[own]]
        if (is_regroup or generation == 1) and own == on_node[0]:
            self.hooks.ring.write_layout(generation, encode_layout(self.layout))
        self.hooks.report_plan_applied(
            step=self.step,
            generation=generation,
            layout_crc=layout_crc(self.layout),
            duration_s=took_s,
            moved_bytes=moved_bytes,
            is_regroup=is_regroup,
        )
        event = "regroup" if is_regroup else "plan"
        line = {"event": event, "generation": generation, "step": self.step, "took_s": took_s}
        self.steps.write(line | {"ended_mono_s": time.monotonic()})
        try:
            self._open_log()
        except HostError as error:  # it leads since others are gone: training matters more
            _log.warning("this rank writes no log of the run: %s", error)
        self.job_log.write()

    def do_step(self) -> Ballot:
        """Make one optimizer step of the whole job. Raises PeerLost."""
        config, engine = self.config, self.engine
        self.phase = Phase.PRE
        self._is_redone, self._begun = self.step == self._begun, self.step
        if self.emulated is not None:
            self._busy_s = self.emulated.busy_s
        if self.faults is not None:
            self.faults.begin_step(self.step)
        rate = learning_rate(config, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        rows = engine.micro_batches(config.rows_per_step, config.rows_per_microbatch)
        self.hooks.ring.enter_phase(LOADING)
        batch = batch_of(config, self.job.sampler, self.step, rows)
        prepared = engine.prepare_step(batch)
        loss, norm = prepared.result.loss.item(), prepared.result.grad_norm.item()
        self.check_groups()
        self.plan = read_offered_plan(self.hooks, self.layout, self.plan, self._check_fits)
        self._prepared, self.pending, self.pending_layout = prepared, self._update, None
        self.phase = Phase.VOTE
        ballot = self._vote(is_finite=math.isfinite(loss) and math.isfinite(norm))
        self.commit(loss=loss, is_applied=ballot.is_applied)
        self.engine.send_weights()
        self.check_groups()
        self.group = self.group.standing()
        return ballot

    def _update(self) -> None:
        counts: dict[int, list[int]] = {}
        if self.checkpoints.partial.is_on:  # read first: the host need not wait for the update
            counts = {layer: r.tolist() for layer, r in self._prepared.result.routed.items()}
        self.engine.commit_step(self._prepared)
        if self.checkpoints.partial.is_on:
            self.checkpoints.partial.count(counts)

    def on_skipped(self) -> None:
        self.engine.commit_step(self._prepared, is_applied=False)
        self.steps.write({"event": "skipped", "step": self.step})

    def _check_fits(self, new: Layout) -> None:
        try:
            self.engine.check_layout(new, self.layout.ranks)
        except ConfigError as error:
            raise ValueError(error.what) from None

    def _vote(self, *, is_finite: bool) -> Ballot:
        mine = Vote(
            ticket=self.ticket,
            generation=self.layout.generation,
            is_finite=is_finite,
            is_stopping=self.is_asked_to_stop(),
            ready_generation=0 if self.plan is None else self.plan.layout.generation,
            ready_crc=0 if self.plan is None else self.plan.crc,
            ready_probe=self.hooks.requested_probe(),
            is_storing=self.checkpoints.is_storing,
            is_copying=self.checkpoints.snapshots.is_copying,
            is_awaited=self.join_queue is not None
            and bool(self.join_queue.candidates(self.spec.node_of)),
        )
        saves = SaveVote()
        if self.pending_layout is None:
            suspects = self.hooks.suspect_ranks()
            saves = self.checkpoints.own_vote(self.step + 1, self.layout, suspects)
        votes = gather_values(_RankVote(commit=mine, saves=saves), self.generation.groups.control)
        self.checkpoints.receive_votes([vote.saves for vote in votes])
        return Ballot(votes=tuple(vote.commit for vote in votes))

    def do_move(self, new: Layout, restore: Sequence[str] = ()) -> int:
        """Go over to `new` with the present members; return bytes sent and read.

        What no member holds comes from the first checkpoint of `restore` that all can read. Raises
        PeerLost, and DataError where there is none.
        """
        self.phase = Phase.PRE
        self.hooks.ring.enter_phase(MOVING)
        self._raise_failure()
        groups = self.generation.groups
        found = self.checkpoints.stage_lost(restore, self.layout, new, groups.control, self.step)
        refilled = None if found is None else found.state
        if not self.has_entered:  # it may have joined the members of another layout
            self.engine.layout, self.engine.num_steps = self.layout, self.step
        prepared = self.engine.prepare_move(new, groups, refilled)
        self._change_over(partial(self._move_over, prepared, found), new)
        return prepared.staged.moved_bytes + (0 if found is None else found.size_bytes)

    def do_restore(self, paths: Sequence[str], layout: Layout) -> int:
        """Go back to the first of these checkpoints that all can read; return bytes read.

        Raises PeerLost, and DataError where there is none.
        """
        self.phase = Phase.PRE
        self.hooks.ring.enter_phase(MOVING)
        found = self.checkpoints.stage(paths, layout, (groups := self.generation.groups).control)
        self._change_over(partial(self._go_back, found, groups), layout)
        return found.size_bytes

    def _change_over(self, change: Callable[[], None], layout: Layout) -> None:
        self.pending, self.pending_layout = change, layout
        self.phase = Phase.VOTE
        self._vote(is_finite=True)
        self.commit(loss=self.last_loss)

    def _move_over(self, prepared: PreparedMove, found: PartialRestore | None) -> None:
        self.engine.commit_move(prepared)
        if found is not None:
            self.checkpoints.count_lost(found)

    def _go_back(self, found: Restored | MemoryRestore, groups: EngineGroups) -> None:
        self.checkpoints.apply(found)
        self.engine.go_back(found.layout, groups, found.step)
        self.job_log.go_back(found.step)
        self.step = self.replica_guard.sound_step = found.step
        self.last_loss = NO_LOSS if found.last_loss is None else found.last_loss

    def offered_layout(self) -> Layout | None:
        """Return the layout of the plan that this rank has read and accepted, if any."""
        return None if self.plan is None else self.plan.layout

    def do_probe(self, number: int) -> None:
        """Measure the devices of the present members, once, and their pairs if that is asked for.

        It changes nothing. Raises PeerLost.
        """
        self.hooks.start_probe(number)
        if is_pairwise(number):
            pairs = probe_pairs(self.generation.groups, self.hooks.timer, self.device)
            self.check_groups()
            for pair in pairs:
                self.hooks.report_pair(step=self.step, number=number, **asdict(pair))
        result = run_probe(self.generation.groups, self.hooks.timer, self.device)
        self.check_groups()
        if result is not None:
            self.hooks.report_probe(step=self.step, number=number, **asdict(result))

    def check_replicas(self) -> RecoveryPlan | None:
        """Compare all replicas, and heal those that a majority contradicts.

        Returns how all go back to an earlier state, where none of those that differ is known to be
        right. Raises PeerLost, and CorruptStateError where there is no such state.
        """
        groups = self.generation.groups
        outcome = self.replica_guard.check(self.engine.states, self.step, self.layout, groups)
        for event in outcome.events:
            self.steps.write(event)
        if outcome.sound_step is None:
            return None
        newest = max(self.layout.generation, self.hooks.ring.command().plan_generation)
        generation = 1 + int(groups.control.all_gather(torch.tensor([newest])).max())
        paths = self.checkpoints.agree_on_earlier(
            self.layout.generation, outcome.sound_step, groups.control
        )
        if not paths or outcome.num_returns > _MOST_RETURNS:
            why = f"for the {outcome.num_returns}th time in a row"
            if not paths:
                why = f"there is no checkpoint of step {outcome.sound_step} or before"
            raise CorruptStateError(
                f"{outcome.difference}; {why}",
                remedy="test memory and devices of the ranks that differ; start again, with "
                "checkpoint_dir, or 3 replicas of each expert, of which a majority heals the third",
            )
        _log.warning(
            "%s: all go back to a checkpoint of step %d or before; suspect silent corruption of "
            "one of their devices",
            outcome.difference,
            outcome.sound_step,
        )
        return RecoveryPlan(layout=replace(self.layout, generation=generation), restore=paths)

    def save(self, *, is_storing: bool, is_copying: bool = False, is_last: bool = False) -> None:
        """Begin a checkpoint and a snapshot where they are due. Raises PeerLost."""
        at = Position(
            layout=self.layout, step=self.step, ticket=self.ticket, last_loss=self.last_loss
        )
        with self.hooks.saving():
            saves = self.checkpoints.save_if_due(at, is_storing=is_storing, is_last=is_last)
        self._report_saves(saves)
        if not is_last:
            copied = self.checkpoints.snapshot_if_due(
                at,
                lambda: self.generation.groups.snapshots,
                self.spec.node_of,
                is_copying=is_copying,
            )
            self._report_saves(copied)

    def end_saves(self) -> None:
        """Wait for the last checkpoint."""
        with self.hooks.saving():
            self._report_saves(self.checkpoints.close())

    def _report_saves(self, saves: Sequence[SaveResult]) -> None:
        for one in saves:
            self.hooks.report_checkpoint(
                step=one.step,
                outcome=one.outcome.value,
                duration_s=one.took_s,
                size_bytes=one.size_bytes,
                reason=one.why,
                in_memory=one.in_memory,
            )

    def on_step(self, loss: float) -> None:
        prepared, now_s = self._prepared, time.perf_counter()
        seconds, self._ended_s = now_s - (self._ended_s or now_s), now_s
        line: dict[str, object] = {
            "step": self.step,
            "generation": self.layout.generation,
            "ended_mono_s": time.monotonic(),
            "tokens": prepared.result.num_tokens,
            "loss": loss,
            "is_redone": self._is_redone,
        }
        if (device := self.emulated) is not None:
            line |= {"overrun_s": device.overrun_s, "compute_s": device.busy_s - self._busy_s}
        self.steps.write(line)
        self.job_log.add(
            StepRecord(
                step=self.step,
                loss=loss,
                grad_norm=prepared.result.grad_norm.item(),
                learning_rate=learning_rate(self.config, self.step),
                tokens=prepared.result.num_tokens,
                seconds=seconds,
                generation=self.layout.generation,
            )
        )
        self.step += 1
        self.checkpoints.step_is_over(self.step)

    def after_step(self) -> None:
        """Do what is due between two steps and changes no state. Raises PeerLost."""
        period = self.config.evaluation_period_steps
        if period and self.step % period == 0 and self.step < self.config.steps:
            self._evaluate()
        self.job_log.write()

    def _evaluate_last_step(self) -> None:
        """Evaluate what was trained, unless all ranks have: one may have died in it."""
        if self.job_log.has_last_step:
            is_missing = torch.tensor([self.job_log.awaits_evaluation])
            if self.generation.groups.control.all_gather(is_missing).any():
                self._evaluate()
        self.job_log.write()

    def _evaluate(self) -> None:
        if (sampler := self.job.evaluation) is not None:
            num_rows = sampler.num_first_places(0)
            rows = self.engine.micro_batches(num_rows, self.config.rows_per_microbatch)
            with self.hooks.evaluating():
                loss = self.engine.evaluate(batch_of(self.config, sampler, 0, rows))
            self.job_log.add_evaluation(loss.item())
