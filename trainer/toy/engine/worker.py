"""One rank's state - model, optimizer, layout, clock - and its two transactions: step and move.

Both have the same shape: do the part, reach VOTE, vote, commit. `pending` is what a commit would
do; after a failure the survivors' verdict may ask for exactly that.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch._C._distributed_c10d import Store

from pacekeeper.core.config.run_fingerprint import run_fingerprint
from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.layout.codec import encode_layout, layout_crc
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.replica_spread import DomainOf
from pacekeeper.core.layout.shrink import ReplicationFloor
from pacekeeper.trainer.checkpoint.async_writer import SaveResult
from pacekeeper.trainer.checkpoint.block_reader import Restored
from pacekeeper.trainer.checkpoint.manager import Checkpoints, Position
from pacekeeper.trainer.checkpoint.policies.partial_experts import MemoryRestore, PartialRestore
from pacekeeper.trainer.distributed import microbenchmark
from pacekeeper.trainer.distributed.device import CLOCKS, device_uuid, rank_device
from pacekeeper.trainer.distributed.process_group import InterruptibleProcessGroup
from pacekeeper.trainer.elastic import plan_intake
from pacekeeper.trainer.elastic.agreement.quorum import Group
from pacekeeper.trainer.elastic.agreement.two_phase_commit import Ballot, Phase, Vote
from pacekeeper.trainer.elastic.step_log import StepLog
from pacekeeper.trainer.elastic.worker import NO_LOSS, Worker
from pacekeeper.trainer.emulation.device import EmulatedClock
from pacekeeper.trainer.emulation.faults import FaultInjector
from pacekeeper.trainer.groups.waiting import WaitLimits
from pacekeeper.trainer.hooks import hooks
from pacekeeper.trainer.toy.engine.clock_factory import make_clock, make_transfers
from pacekeeper.trainer.toy.engine.job_rules import (
    check_fits,
    first_layout,
    floor_of,
    learning_rate,
    load_period_steps,
    model_shape,
)
from pacekeeper.trainer.toy.model import dataset
from pacekeeper.trainer.toy.model.block_state_dict import (
    ModelStates,
    num_dense_parameters,
    ordered_parameters,
)
from pacekeeper.trainer.toy.model.dataset import Corpus
from pacekeeper.trainer.toy.model.flop_counter import WorkMeter
from pacekeeper.trainer.toy.model.transformer import MoETransformer
from pacekeeper.trainer.toy.parallel import replica_consistency, resharding
from pacekeeper.trainer.toy.parallel.forward_backward import Passes
from pacekeeper.trainer.toy.parallel.grad_reduce import ReplicaSync

_LOG_PERIOD_STEPS = 10
_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Rank(Worker):
    """A worker of the byte-level model. Use from one thread."""

    compute_s: float = 0.0  # of the open step, where the clock tells it within the step
    is_redone: bool = False
    has_begun: bool = False  # the open step, at least once
    plan: plan_intake.Plan | None = None
    _fabric: InterruptibleProcessGroup | None = None

    def __post_init__(self) -> None:
        spec, config = self.spec, self.config
        torch.set_num_threads(1)
        self.layout = first_layout(config, spec.world_size, spec.node_of)
        self.group = Group.first(self.layout.generation, self.layout.ranks)
        self.corpus = Corpus.from_stdlib(config)
        self.device = rank_device(config.clock, spec.rank, spec.node_of)
        self.model = MoETransformer(config, self.layout, spec.rank).to(self.device)
        self.optimizer = torch.optim.AdamW(
            ordered_parameters(self.model),
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
        )
        self.meter = WorkMeter()
        self.clock, targets = make_clock(
            config, spec.rank, spec.world_size, self.meter, self.device
        )
        self.transfers = make_transfers(config, targets)
        self.faults = (
            FaultInjector(directory=Path(spec.faults_dir), rank=spec.rank, targets=targets)
            if spec.faults_dir
            else None
        )
        self.log = StepLog(spec.run_dir, spec.rank, is_continued=spec.first_run_id > 0)
        self.checkpoints = Checkpoints(
            config,
            rank=spec.rank,
            run_id=spec.run_id,
            first_run_id=spec.first_run_id or spec.run_id,
            identity=run_fingerprint(config, self.corpus.crc()),
            states=ModelStates(self.model, self.optimizer),
            note=self.log.write,
        )

    def attach(self) -> None:
        spec, config = self.spec, self.config
        self.hooks = hooks.attach(
            job=config.job,
            rank=spec.rank,
            world_size=max(spec.world_size, spec.rank + 1),
            ring_dir=spec.ring_dir,
            clock=CLOCKS[config.clock],
            device_uuid=device_uuid(self.device),
            timer=self.clock,  # what it knows late is told when this rank is done
            model=model_shape(config, num_dense_parameters(self.model, self.layout)),
            run_id=spec.run_id,
            can_probe=True,
        )

    @property
    def config(self) -> TrainConfig:
        """The settings."""
        assert isinstance(self.spec.config, TrainConfig), "chosen by them"
        return self.spec.config

    @property
    def data_crc(self) -> int:
        return int(self.checkpoints.identity["corpus"])

    def floor(self, num_living: int, domain_of: DomainOf) -> ReplicationFloor:
        return floor_of(self.config, num_living, domain_of)

    @property
    def fabric(self) -> InterruptibleProcessGroup:
        """The group this rank is in."""
        assert self._fabric is not None, "joined before the first step"
        return self._fabric

    def form(self, store: Store, limits: WaitLimits, is_aborted: Callable[[], bool]) -> None:
        group = self.group
        fabric = InterruptibleProcessGroup(
            store=store,
            generation=group.generation,
            name=group.name,
            rank=self.spec.rank,
            ranks=group.members,
            is_aborted=is_aborted,
            tick_s=limits.tick_s,
            timeout_s=limits.timeout_s,
            arrive_s=limits.arrive_s,
            answer_s=limits.answer_s,
        )
        self.join(fabric)

    def join(self, fabric: InterruptibleProcessGroup) -> None:
        """Use `fabric` from now on."""
        self._fabric = fabric
        fabric.transfers = self.transfers

    def resume(self) -> None:
        dataset.check(self.corpus.crc(), self.fabric)
        paths = self.checkpoints.agree_on_start(self.fabric)
        if paths:
            self.do_restore(paths, self.layout)

    def leave(self) -> None:
        if self._fabric is not None:
            self._fabric.close()
            self.checkpoints.snapshots.leave()

    def close(self) -> None:
        self.fabric.close()

    def after_step(self) -> None:
        """Nothing is due."""

    def finish(self) -> None:
        self.fabric.exchange([1.0])

    def take_place(self) -> None:
        """Form the groups of `self.layout` within the joined one. Raises PeerLost."""
        self.model.set_layout(self.layout, self.fabric, self.spec.node_of)
        self.passes = Passes(
            config=self.config,
            model=self.model,
            corpus=self.corpus,
            device=self.device,
            meter=self.meter,
            clock=self.clock,
            hooks=self.hooks,
            fabric=self.fabric,
            layout=self.layout,
        )
        self.sync = ReplicaSync(self.layout, self.fabric)

    def enter(self, *, is_regroup: bool, moved_bytes: int, took_s: float) -> None:
        """Train under `self.layout` from the current step on, in its place; say so."""
        self.plan, self.has_entered = None, True
        self.group = self.group.standing()
        generation = self.layout.generation
        node_of = self.spec.node_of
        on_node = [r for r in self.fabric.ranks if node_of[r] == node_of[self.spec.rank]]
        if (is_regroup or generation == 1) and self.spec.rank == on_node[0]:
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
        self.log.write(line | {"ended_mono_s": time.monotonic()})

    def do_step(self) -> Ballot:
        """One optimizer step of the whole job. Raises PeerLost."""
        if self.faults is not None:
            self.faults.begin_step(self.step)
        self.hooks.begin_step(self.step)
        self.phase = Phase.PRE
        self.is_redone, self.has_begun = self.has_begun, True
        self.meter.reset()
        self._take_transfers()  # of a step that was not ended
        self.optimizer.zero_grad()
        loss_sum = self._forward_backward()
        self.sync.synchronise(self.model)
        self.plan = plan_intake.read_offered_plan(
            self.hooks, self.layout, self.plan, lambda new: check_fits(new, self.layout)
        )
        self.pending, self.pending_layout = self._apply_update, None
        self.phase = Phase.VOTE
        ballot = self._vote(is_finite=self._gradients_are_finite(), loss=loss_sum)
        targets = self.corpus.target_tokens(self.step)
        loss = sum(vote.loss_sum for vote in ballot.votes) / targets
        self.commit(loss=loss, is_applied=ballot.is_applied)
        self.group = self.group.standing()
        return ballot

    def do_move(self, new: Layout, restore: Sequence[str] = ()) -> int:
        """Go over to `new` with the present members; what none of them holds comes from the first
        of the checkpoints `restore` that all can read. Returns bytes sent and read.

        Raises PeerLost, and DataError where there is none.
        """
        self.phase = Phase.PRE
        found = self.checkpoints.stage_lost(restore, self.layout, new, self.fabric, self.step)
        refilled = None if found is None else found.state
        staged = resharding.stage(
            self.model, self.optimizer, self.layout, new, self.fabric, refilled
        )
        self._change_over(partial(self._move_over, staged, found), new)
        return staged.moved_bytes + (0 if found is None else found.size_bytes)

    def do_restore(self, paths: Sequence[str], layout: Layout) -> int:
        """Go back to the first of these checkpoints that all can read, under `layout`; bytes read.

        Raises PeerLost, and DataError where there is none.
        """
        self.phase = Phase.PRE
        found = self.checkpoints.stage(paths, layout, self.fabric)
        self._change_over(partial(self._go_back, found), layout)
        return found.size_bytes

    def _change_over(self, change: Callable[[], None], layout: Layout) -> None:
        self.pending, self.pending_layout = change, layout
        self.phase = Phase.VOTE
        self._vote(is_finite=True)
        self.commit(loss=self.last_loss)

    def save(self, *, is_storing: bool, is_copying: bool = False, is_last: bool = False) -> None:
        """Save a checkpoint, and make a snapshot, where one is due. Raises PeerLost."""
        at = Position(
            layout=self.layout, step=self.step, ticket=self.ticket, last_loss=self.last_loss
        )
        self._report_saves(self.checkpoints.save_if_due(at, is_storing=is_storing, is_last=is_last))
        if not is_last:
            copied = self.checkpoints.snapshot_if_due(
                at,
                lambda: self.fabric.group(self.fabric.ranks, "snapshots"),
                self.spec.node_of,
                is_copying=is_copying,
            )
            self._report_saves(copied)

    def end_saves(self) -> None:
        """Wait for the last checkpoint."""
        self._report_saves(self.checkpoints.close())

    def do_probe(self, number: int) -> None:
        """Run the probe with the present members, once. No ticket: it changes nothing."""
        self.hooks.start_probe(number)
        reading = microbenchmark.run(self.fabric, self.clock, self.meter, self.device)
        if reading is not None:
            self.hooks.report_probe(step=self.step, number=number, **asdict(reading))

    def check_replicas(self) -> None:
        """Are all copies the same, after the last step? Raises CorruptStateError, PeerLost."""
        replica_consistency.check(
            self.model, self.optimizer, self.layout, self.fabric, self.step - 1
        )
        self.log.write({"event": "checked", "step": self.step - 1})

    def offered_layout(self) -> Layout | None:
        return None if self.plan is None else self.plan.layout

    def on_skipped(self) -> None:
        self.log.write({"event": "skipped", "step": self.step})

    def _forward_backward(self) -> float:
        """Gradients of this rank's part of its rows; its sum of the loss over their targets."""
        sums = self.passes.run(self.step)
        self.compute_s = sums.compute_s
        if self.step % load_period_steps(self.config) == 0:
            for layer, counts in zip(self.model.own_layers, sums.counts_LE.tolist(), strict=True):
                self.hooks.report_expert_loads(layer, counts)
        return sums.loss

    def _vote(self, *, is_finite: bool, loss: float = 0.0) -> Ballot:
        mine = Vote(
            ticket=self.ticket,
            generation=self.layout.generation,
            is_finite=is_finite,
            is_stopping=self.is_asked_to_stop(),
            ready_generation=0 if self.plan is None else self.plan.layout.generation,
            ready_crc=0 if self.plan is None else self.plan.crc,
            loss_sum=loss,
            ready_probe=self.hooks.requested_probe(),
            is_storing=self.checkpoints.is_storing,
            is_copying=self.checkpoints.snapshots.is_copying,
            is_awaited=self.join_queue is not None
            and bool(self.join_queue.candidates(self.spec.node_of)),
        )
        word = [] if self.pending_layout else self._checkpoint_vote()
        votes = self.fabric.exchange(mine.encode() + word).tolist()
        self.checkpoints.receive_votes([vote[len(mine.encode()) :] for vote in votes])
        return Ballot(votes=tuple(Vote.decode(values) for values in votes))

    def _checkpoint_vote(self) -> list[float]:
        return self.checkpoints.encode_vote(self.step + 1, self.layout, self.hooks.suspect_ranks())

    def _gradients_are_finite(self) -> bool:
        total = sum(float(p.grad.sum()) for p in self.model.parameters() if p.grad is not None)
        return total - total == 0.0

    def _move_over(self, staged: resharding.Staged, found: PartialRestore | None) -> None:
        resharding.swap_in(self.model, self.optimizer, staged)
        if found is not None:
            self.checkpoints.count_lost(found)

    def _go_back(self, found: Restored | MemoryRestore) -> None:
        self.checkpoints.apply(found)
        self.step, self.has_begun = found.step, False
        self.last_loss = NO_LOSS if found.last_loss is None else found.last_loss

    def _apply_update(self) -> None:
        rate = learning_rate(self.config, self.step)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.checkpoints.partial.count(self.meter.routed)

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

    def _take_transfers(self) -> tuple[float | None, int]:
        return (None, 0) if self.transfers is None else self.transfers.take()

    def on_step(self, loss: float) -> None:
        tokens = self.corpus.num_tokens(self.step)
        transfer_s, transfer_bytes = self._take_transfers()
        self.hooks.end_step(
            tokens=tokens,
            loss=loss,
            is_redone=self.is_redone,
            transfer_s=transfer_s,
            transfer_bytes=transfer_bytes,
        )
        line: dict[str, object] = {
            "step": self.step,
            "generation": self.layout.generation,
            "ended_mono_s": time.monotonic(),
            "tokens": tokens,
            "loss": loss,
            "is_redone": self.is_redone,
        }
        if isinstance(self.clock, EmulatedClock):
            line |= {
                "segments": self.clock.num_segments,
                "overruns": self.clock.num_overruns,
                "overrun_s": self.clock.overrun_s,
                "compute_s": self.compute_s,
            }
        self.log.write(line)
        self.has_begun = False
        self.step += 1
        if self.spec.rank == self.layout.ranks[0] and self.step % _LOG_PERIOD_STEPS == 0:
            _log.info("step=%d loss=%.4f", self.step, loss)
        self.checkpoints.step_is_over(self.step)
