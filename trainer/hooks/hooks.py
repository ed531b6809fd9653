"""Hooks for any training loop: `attach`, then steps, micro-batches and plans of one rank.

Needs the standard library only. After `attach` no call blocks or raises, with or without an agent
on the node: errors are counted by the ring, logged once, and disable it after the third. See
`examples/attach.py` for a complete loop.
"""

import logging
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from pacekeeper.core.telemetry.attachment import Attachment, Capability, Clock, ModelShape
from pacekeeper.core.telemetry.expert_row_features import NO_ROWS_OVER
from pacekeeper.core.telemetry.record_codec import (
    pack_expert_load,
    pack_micro_batch,
    pack_plan_applied,
    pack_step,
)
from pacekeeper.core.telemetry.records import (
    LOADS_PER_RECORD,
    CheckpointRecord,
    PairRecord,
    PlanRefusedRecord,
    ProbeRecord,
    SnapshotRecord,
)
from pacekeeper.core.telemetry.shm_ring import DEFAULT_RING_DIR
from pacekeeper.core.telemetry.sign_of_life import EVALUATING, OUTSIDE, SAVING, STEPPING
from pacekeeper.trainer.hooks.compute_timers import (
    MAX_LATE,
    ComputeTime,
    LateClock,
    SegmentClock,
    WallClock,
)
from pacekeeper.trainer.hooks.contexts import (
    InPhase,
    Loading,
    MicrobatchFeatures,
    MicrobatchTimer,
    StepResult,
    Waiting,
    WaitOfThread,
)
from pacekeeper.trainer.hooks.plan_inbox import PlanInbox, PlanOffer
from pacekeeper.trainer.hooks.ring_writer import Ring
from pacekeeper.trainer.hooks.stack_dump import register_stack_dump

RUN_ID_VARIABLE = "PACEKEEPER_RUN_ID"
FORMER_VARIABLE = "PACEKEEPER_LIFE"  # of launchers from before the name above


def run_id_from_environment() -> int:
    """Return the run ID from PACEKEEPER_RUN_ID, which a launcher sets; 0 if unset."""
    text = os.environ.get(RUN_ID_VARIABLE) or os.environ.get(FORMER_VARIABLE, "")
    if text and not (text.isascii() and text.isdigit()):
        raise ValueError(f"{RUN_ID_VARIABLE}: expected a whole number above 0, got {text!r}")
    return int(text or 0)


def checked_place(rank: int, world_size: int) -> tuple[int, int]:
    """Return `rank` and `world_size`; raise ValueError if they are not a rank of a world."""
    for name, value in (("rank", rank), ("world_size", world_size)):
        if not isinstance(value, int):
            raise ValueError(
                f"{name}={value!r}: expected a whole number; from the environment, use "
                f'int(os.environ["{name.upper()}"])'
            )
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank {rank} is not in a world of {world_size}: ranks count from 0 over all nodes; "
            "pass both as torch.distributed or the launcher (RANK, WORLD_SIZE) gives them"
        )
    return rank, world_size


RING_DIR_VARIABLE = "PACEKEEPER_RING_DIR"
_log = logging.getLogger(__name__)


def attach(
    *,
    job: str,
    rank: int,
    world_size: int,
    ring_dir: str | None = None,
    role: str = "train",
    clock: Clock = Clock.WALL,
    device_uuid: str = "",
    model: ModelShape | None = None,
    timer: SegmentClock | None = None,
    run_id: int | None = None,
    can_probe: bool = False,
    capabilities: Iterable[Capability] = (),
) -> "Hooks":
    """Attach this rank to the agent of its node.

    If the ring directory cannot be used, training continues unmonitored and one warning is logged.

    Args:
        job: Name of the job, the same on all ranks.
        rank: Global rank, from 0.
        world_size: Number of ranks of the job.
        ring_dir: The agent's ring directory; default: PACEKEEPER_RING_DIR, then the agent's own
            default.
        role: Ranks of one role are compared with each other, such as "stage0".
        clock: What `timer` measures; stored with the attachment.
        device_uuid: UUID of the GPU that this rank computes on, as NVML reports it.
        model: Shape of the model, if plans may be offered.
        timer: Clock of `micro_batch_timer`; default: wall time.
        run_id: Number of this launch: ascending from launch to launch and equal on all ranks, such
            as the start in Unix milliseconds. Default: PACEKEEPER_RUN_ID; without it launches are
            distinguished by the process ids of their ranks.
        can_probe: Whether this trainer runs the probes of `requested_probe`.
        capabilities: The plans that this trainer can carry out (docs/plan-consumer.md); none: all
            but `schedule`. Without `model` no plan is offered.

    Raises:
        ValueError: If the job name, rank, world size or run ID is invalid.
    """
    rank, world_size = checked_place(rank, world_size)
    if run_id is None:
        run_id = run_id_from_environment()
    attachment = Attachment(
        job=job,
        rank=rank,
        world_size=world_size,
        pid=os.getpid(),
        role=role,
        clock=clock,
        device_uuid=device_uuid,
        model=model,
        run_id=run_id,
        can_probe=can_probe,
        plan_kinds=" ".join(sorted(capabilities)),
    )
    directory = ring_dir or os.environ.get(RING_DIR_VARIABLE) or DEFAULT_RING_DIR
    ring = Ring.create(Path(directory), attachment)
    register_stack_dump(ring)
    return Hooks(ring, rank, timer or WallClock())


class Hooks:
    """Reports steps and micro-batches of one rank, and offers it plans.

    Use it from the training thread.
    """

    micro_batch_block = MicrobatchTimer

    def __init__(self, ring: Ring, rank: int, timer: SegmentClock) -> None:
        self.ring = ring
        self.rank = rank
        self.generation = 0
        self.timer = timer
        self._step = 0
        self._began_s = 0.0
        self.input_s: float | None = None  # input wait since the last step; None: never reported
        self._before_s = 0.0  # the part of `input_s` before the step began
        self._micro_batch = 0
        # For a late clock: (step, number, generation, features) of the newest micro-batches.
        self._late: deque[tuple[int, int, int, MicrobatchFeatures]] = deque(maxlen=MAX_LATE + 1)
        self._waiting = Waiting(timer, ring)
        self._offers = PlanInbox(ring)
        self._probed = 0  # number of the newest probe that this rank has started

    def begin_step(self, step: int) -> None:
        """Start an optimizer step, or start the same one again."""
        self._step = step
        self._micro_batch = 0
        self._before_s = self.input_s or 0.0
        self.ring.enter_phase(STEPPING)
        self._began_s = time.monotonic()

    def report_microbatch(
        self,
        *,
        compute: ComputeTime | None,
        tokens: int,
        sum_len_squared: int = 0,
        expert_rows: int = 0,
        num_active_experts: int = 0,
        rows_over: Sequence[int] = NO_ROWS_OVER,
        num_documents: int = 0,
        head_tokens: int = 0,
        tensor_share: float = 1.0,
    ) -> None:
        """Report a computed micro-batch.

        Args:
            compute: Its compute time; None if the clock does not know it yet.
            tokens: Tokens of the micro-batch.
            sum_len_squared: Sum over its sequences of length squared, in tokens squared.
            expert_rows: Rows that this rank's experts computed.
            num_active_experts: This rank's experts with at least one row.
            rows_over: `core.telemetry.expert_row_features.rows_over` of the rows of each local
                expert.
            num_documents: Documents in the micro-batch.
            head_tokens: Tokens whose logits this rank computes, if stages differ in it.
            tensor_share: Part of all attention and dense layers that this rank holds, 0 to 1.
        """
        self.on_microbatch_end(
            compute,
            (
                tokens, sum_len_squared, expert_rows, num_active_experts, rows_over, num_documents,
                head_tokens, tensor_share,
            ),
        )  # fmt: skip

    def on_microbatch_end(self, compute: ComputeTime | None, features: MicrobatchFeatures) -> None:
        """Report the micro-batch of `micro_batch_timer`, whose features are a tuple already."""
        try:
            lag = -1
            if compute is not None:
                # Unpacked at once: a look-up per field costs several times as much.
                compute_s, cpu_s, run_queue_s, stall_s, wait_s, ended_s, lag, more = compute
            if lag == 0:
                # The same as `_write_late`, inlined: one call less in every micro-batch.
                tokens, squared, rows, active, over, documents, head, share = features
                self.ring.write_payload(
                    pack_micro_batch(
                        self.rank, self._step, self._micro_batch, self.generation, compute_s,
                        tokens, squared, rows, active, cpu_s, run_queue_s, stall_s, wait_s,
                        ended_s, documents, head, share, *over,
                    )
                )  # fmt: skip
            else:
                self._late.append((self._step, self._micro_batch, self.generation, features))
                if compute is not None:
                    self._write_late((compute, *more))
        except Exception as error:
            self.ring.count_error(error)
        self._micro_batch += 1

    def _write_late(self, known: Iterable[ComputeTime]) -> None:
        """Write each time with the features of its micro-batch, unless those were dropped."""
        for compute in known:
            if compute.lag >= len(self._late):
                continue
            step, number, generation, features = self._late[-1 - compute.lag]
            tokens, squared, rows, active, over, documents, head, share = features
            try:
                self.ring.write_payload(
                    pack_micro_batch(
                        self.rank, step, number, generation, compute.compute_s, tokens, squared,
                        rows, active, compute.cpu_s, compute.run_queue_s, compute.stall_s,
                        compute.wait_s, compute.ended_mono_s, documents, head, share, *over,
                    )
                )  # fmt: skip
            except Exception as error:  # one bad value loses one record
                self.ring.count_error(error)

    def report_expert_loads(
        self, layer: int, counts: Sequence[int], *, step: int | None = None
    ) -> None:
        """Report how many tokens of this rank's batch the router of a layer sent to each expert.

        Args:
            layer: Index of the layer.
            counts: Tokens for each expert of the layer.
            step: Step of the counts, if they became known later; default: the current step.
        """
        step = self._step if step is None else step
        try:
            for first in range(0, len(counts), LOADS_PER_RECORD):
                part = counts[first : first + LOADS_PER_RECORD]
                self.ring.write_payload(
                    pack_expert_load(self.rank, step, self.generation, layer, first, part)
                )
        except Exception as error:
            self.ring.count_error(error)

    def end_step(
        self,
        *,
        tokens: int,
        loss: float | None = None,
        is_redone: bool = False,
        transfer_s: float | None = None,
        transfer_bytes: int = 0,
        sum_len_squared: int = 0,
        outside_s: float = 0.0,
        host_s: float | None = None,
    ) -> None:
        """Report that the step is committed.

        Args:
            tokens: Tokens of the global batch.
            loss: Loss of the global batch.
            is_redone: Whether the step was repeated after a failure.
            transfer_s: This rank's time in collectives that all ranks entered together.
            transfer_bytes: Bytes of those collectives.
            sum_len_squared: Sum of squared sequence lengths of the global batch.
            outside_s: Time within the step that was not training, such as an evaluation. Time in
                `loading` since the last step counts as part of this step.
            host_s: This rank's time on the host for planning exchanges of rows, which is in no
                micro-batch's compute time.
        """
        try:
            self.ring.enter_phase(OUTSIDE)
            now_s = time.monotonic()
            input_s, rest_s = self.input_s, self._before_s - outside_s
            if input_s is not None:
                self.input_s = self._before_s = 0.0
            self.ring.write_payload(
                pack_step(
                    self.rank, self._step, self.generation,
                    max(0.0, now_s - self._began_s + rest_s), tokens, loss, is_redone, now_s,
                    transfer_s, transfer_bytes, sum_len_squared, input_s, host_s,
                )
            )  # fmt: skip
        except Exception as error:
            self.ring.count_error(error)

    def offered_plan(self) -> PlanOffer | None:
        """Return a plan above the current generation once its file is complete, else None."""
        return self._offers.above(self.generation)

    def refuse_plan(self, generation: int, reason: str) -> None:
        """Refuse the offered plan of `generation`: it is not offered again.

        The controller receives the beginning of `reason`. Another plan of the same generation may
        still be offered.
        """
        try:
            offer = self._offers.refuse(generation)
            if offer is not None:
                self.ring.write(
                    PlanRefusedRecord(
                        rank=self.rank,
                        generation=self.generation,
                        plan_generation=generation,
                        layout_crc=zlib.crc32(offer.layout_json),
                        reason=reason,
                    )
                )
        except Exception as error:
            self.ring.count_error(error)
        _log.warning("rank=%d plan=%d refused: %s", self.rank, generation, reason)

    def requested_probe(self) -> int:
        """Return the number of a requested probe that this rank has not started, else 0.

        Run it at a step boundary, and only when all ranks agree to: otherwise some would wait.
        """
        wanted = self.ring.command().probe
        return wanted if wanted > self._probed else 0

    def start_probe(self, number: int) -> None:
        """Mark a probe as started; it is not requested again, whatever its result."""
        self._probed = max(self._probed, number)

    def report_probe(self, *, step: int, number: int, **times_s: float) -> None:
        """Report a probe's times: `gemm_s`, `copy_s`, `exchange_s` and its total `duration_s`."""
        try:
            self.ring.write(
                ProbeRecord(
                    rank=self.rank, step=step, generation=self.generation, number=number, **times_s
                )
            )
        except Exception as error:
            self.ring.count_error(error)

    def report_pair(
        self, *, step: int, number: int, peer: int, num_bytes: int, exchange_s: float
    ) -> None:
        """Report one pair of a probe of pairs, before the probe's own times.

        Args:
            step: The step after which it ran.
            number: The number of the probe.
            peer: The other rank.
            num_bytes: Size of a message in each direction.
            exchange_s: Time of one exchange.
        """
        try:
            self.ring.write(
                PairRecord(
                    rank=self.rank, step=step, generation=self.generation, peer=peer,
                    number=number, num_bytes=num_bytes, exchange_s=exchange_s,
                )
            )  # fmt: skip
        except Exception as error:
            self.ring.count_error(error)

    def report_checkpoint(
        self,
        *,
        step: int,
        outcome: str,
        duration_s: float,
        size_bytes: int = 0,
        reason: str = "",
        in_memory: bool = False,
    ) -> None:
        """Report the outcome of this rank's part of a checkpoint.

        Args:
            step: Step of the checkpoint.
            outcome: "complete" (the whole checkpoint, with this part), "written", "skipped" (the
                previous one is still being written) or "failed".
            duration_s: Time of writing.
            size_bytes: Size of this part.
            reason: Why it was skipped or failed.
            in_memory: Whether it is a snapshot in memory.
        """
        try:
            self.ring.write(
                (SnapshotRecord if in_memory else CheckpointRecord)(
                    rank=self.rank,
                    step=step,
                    generation=self.generation,
                    outcome=outcome,
                    duration_s=duration_s,
                    size_bytes=size_bytes,
                    reason=reason,
                    ended_mono_s=time.monotonic(),
                )
            )
        except Exception as error:
            self.ring.count_error(error)

    def dead_ranks(self) -> frozenset[int]:
        """Return the ranks of the job that the controller reports as dead."""
        return self.ring.command().dead_ranks

    def suspect_ranks(self) -> frozenset[int]:
        """Return the ranks on nodes with an open finding, as the controller last reported them."""
        return self.ring.command().suspect_ranks

    def set_generation(self, generation: int) -> None:
        """Set the generation of later records; only plans above it are offered."""
        self.generation = generation

    def report_plan_applied(
        self,
        *,
        step: int,
        generation: int,
        layout_crc: int,
        duration_s: float = 0.0,
        moved_bytes: int = 0,
        is_regroup: bool = False,
    ) -> None:
        """Report that this rank trains on the layout of `generation` from `step` on."""
        try:
            previous, self.generation = self.generation, generation
            self.ring.write_payload(
                pack_plan_applied(
                    self.rank, step, generation, previous, duration_s, moved_bytes, is_regroup,
                    layout_crc, time.monotonic(),
                )
            )  # fmt: skip
        except Exception as error:
            self.ring.count_error(error)

    def detach(self) -> None:
        """End the attachment. The ring stays until the agent has read it."""
        try:
            if isinstance(self.timer, LateClock):
                self._write_late(self.timer.known())
        except Exception as error:
            self.ring.count_error(error)
        self.ring.close()

    def step(self, step: int, *, tokens: int = 0, sum_len_squared: int = 0) -> StepResult:
        """Return a `with` block that calls `begin_step` and, unless it raises, `end_step`.

        Values known only inside, such as the loss, are set on the result it yields. If only steps
        are reported, without micro-batches, the job is monitored as a whole by their durations.
        """
        return StepResult(self, step, tokens, sum_len_squared)

    def micro_batch_timer(
        self,
        *,
        tokens: int,
        sum_len_squared: int = 0,
        expert_rows: int = 0,
        num_active_experts: int = 0,
        rows_over: Sequence[int] = NO_ROWS_OVER,
        num_documents: int = 0,
        head_tokens: int = 0,
        tensor_share: float = 1.0,
    ) -> MicrobatchTimer:
        """Return a `with` block that times a micro-batch, without time in `waiting`.

        The arguments are those of `report_microbatch`.
        """
        return self.micro_batch_block(
            self,
            (
                tokens, sum_len_squared, expert_rows, num_active_experts, rows_over, num_documents,
                head_tokens, tensor_share,
            ),
        )  # fmt: skip

    def waiting(self) -> Waiting:
        """Return a `with` block for waits for other ranks, inside `micro_batch_timer`."""
        return self._waiting

    def loading(self) -> Loading:
        """Return a `with` block for the wait for input, outside of micro-batches."""
        return Loading(self)

    def waits_of_this_thread(self) -> Callable[[], WaitOfThread]:
        """Return what makes `with` blocks of waits; in other threads they do nothing."""
        return partial(WaitOfThread, self.ring, threading.get_ident())

    def saving(self) -> InPhase:
        """Return a `with` block for saving a checkpoint: it may take long, and is not a hang."""
        return InPhase(self.ring, SAVING)

    def evaluating(self) -> InPhase:
        """Return a `with` block for an evaluation: it may take long, and is not a hang."""
        return InPhase(self.ring, EVALUATING)
