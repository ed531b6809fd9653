"""The seam of any trainer: attached, step began, micro-batch, step ended, plan offered.

Standard library only. No call blocks or raises; all of them work with no agent on the node. What
goes wrong in here is counted by the ring, which says so and in the end disarms itself. See
`examples/attach.py` for a whole loop.
"""

import logging
import os
import time
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from pacekeeper.core.config.agent import AgentConfig
from pacekeeper.core.telemetry.attachment import Attachment, Clock, ModelShape
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
    PlanRefusedRecord,
    ProbeRecord,
    SnapshotRecord,
)
from pacekeeper.trainer.hooks.compute_timers import (
    MAX_LATE,
    ComputeTime,
    LateClock,
    SegmentClock,
    WallClock,
)
from pacekeeper.trainer.hooks.contexts import Loading, MicroBatchTimer, StepResult, Waiting, Work
from pacekeeper.trainer.hooks.plan_inbox import Offers, PlanOffer
from pacekeeper.trainer.hooks.ring_writer import Ring

LIFE_VARIABLE = "PACEKEEPER_LIFE"


def life_of_environment() -> int:
    """The number of this launch, as a launcher set it; 0: none did."""
    text = os.environ.get(LIFE_VARIABLE, "")
    if text and not (text.isascii() and text.isdigit()):
        raise ValueError(f"{LIFE_VARIABLE}: expected a whole number above 0, got {text!r}")
    return int(text or 0)


def checked_place(rank: int, world_size: int) -> tuple[int, int]:
    """Both; raises ValueError where they can not be, saying what they should."""
    for name, value in (("rank", rank), ("world_size", world_size)):
        if not isinstance(value, int):
            raise ValueError(
                f"{name}={value!r}: expected a whole number; of the environment, "
                f'int(os.environ["{name.upper()}"])'
            )
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank {rank} is not in a world of {world_size}: ranks count from 0 over all nodes; "
            "give both as torch.distributed or the launcher (RANK, WORLD_SIZE) does"
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
    life: int | None = None,
    can_probe: bool = False,
) -> "Hooks":
    """Attach this rank to its node's ring directory.

    `ring_dir` defaults to the environment's PACEKEEPER_RING_DIR (for launchers to set), then to the
    agent's own default. `timer` is what `micro_batch_timer` measures with (default: wall time).
    `life` tells one launch of the job from the next: any number that ascends and is the same on
    all ranks, such as the Unix milliseconds of the start. It defaults to the environment's
    PACEKEEPER_LIFE; without one, launches are told apart by the pids of their ranks. `can_probe`:
    this trainer answers `probe_asked`. Without a
    usable directory the hooks do nothing, with one warning. Raises ValueError for a wrong job
    name, rank, world size or life only.
    """
    rank, world_size = checked_place(rank, world_size)
    if life is None:
        life = life_of_environment()
    attachment = Attachment(
        job=job,
        rank=rank,
        world_size=world_size,
        pid=os.getpid(),
        role=role,
        clock=clock,
        device_uuid=device_uuid,
        model=model,
        life=life,
        can_probe=can_probe,
    )
    directory = ring_dir or os.environ.get(RING_DIR_VARIABLE) or AgentConfig().ring_dir
    return Hooks(Ring.create(Path(directory), attachment), rank, timer or WallClock())


class Hooks:
    """The five moments of one rank. Use from the training thread."""

    micro_batch_block = MicroBatchTimer

    def __init__(self, ring: Ring, rank: int, timer: SegmentClock) -> None:
        self.ring = ring
        self.rank = rank
        self.generation = 0
        self.timer = timer
        self._step = 0
        self._began_s = 0.0
        self.input_s: float | None = None  # waited for since the last step; None: never told
        self._before_s = 0.0  # of it, before the step began
        self._micro_batch = 0
        # Of a clock that tells late, (step, number, generation, work) of the newest micro-batches.
        self._late: deque[tuple[int, int, int, Work]] = deque(maxlen=MAX_LATE + 1)
        self._waiting = Waiting(timer, ring)
        self._offers = Offers(ring)
        self._probed = 0  # number of the newest probe that this rank has begun

    def step_began(self, step: int) -> None:
        """Moment 2: an optimizer step starts (or starts again)."""
        self._step = step
        self._micro_batch = 0
        self._before_s = self.input_s or 0.0
        self._began_s = time.monotonic()

    def micro_batch(
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
        """Moment 3: a micro-batch was computed; its work in tokens, tokens^2 and expert rows.

        `rows_over`: what `core.expert_rows.rows_over` makes of the rows of each local expert.
        `tensor_share`: the part of all attention and dense layers that this rank holds;
        `head_tokens`: tokens whose logits it computes, told where stages differ in that.
        """
        self.told(
            compute,
            (
                tokens, sum_len_squared, expert_rows, num_active_experts, rows_over, num_documents,
                head_tokens, tensor_share,
            ),
        )  # fmt: skip

    def told(self, compute: ComputeTime | None, work: Work) -> None:
        """Moment 3 for `micro_batch_timer`, whose work is a tuple already."""
        try:
            lag = -1
            if compute is not None:
                # At once: a look-up per field would cost several times that.
                compute_s, cpu_s, run_queue_s, stall_s, wait_s, ended_s, lag, more = compute
            if lag == 0:
                # As `_tell_late` does, but for the price of one more call: this one is in every
                # step.
                tokens, squared, rows, active, over, documents, head, share = work
                self.ring.write_payload(
                    pack_micro_batch(
                        self.rank, self._step, self._micro_batch, self.generation, compute_s,
                        tokens, squared, rows, active, cpu_s, run_queue_s, stall_s, wait_s,
                        ended_s, documents, head, share, over,
                    )
                )  # fmt: skip
            else:
                self._late.append((self._step, self._micro_batch, self.generation, work))
                if compute is not None:
                    self._tell_late((compute, *more))
        except Exception as error:
            self.ring.count_error(error)
        self._micro_batch += 1

    def _tell_late(self, known: Iterable[ComputeTime]) -> None:
        """Each with the work of the micro-batch it is of; none where that is forgotten."""
        for compute in known:
            if compute.lag >= len(self._late):
                continue
            step, number, generation, work = self._late[-1 - compute.lag]
            tokens, squared, rows, active, over, documents, head, share = work
            try:
                self.ring.write_payload(
                    pack_micro_batch(
                        self.rank, step, number, generation, compute.compute_s, tokens, squared,
                        rows, active, compute.cpu_s, compute.run_queue_s, compute.stall_s,
                        compute.wait_s, compute.ended_mono_s, documents, head, share, over,
                    )
                )  # fmt: skip
            except Exception as error:  # one bad value loses one record, no more
                self.ring.count_error(error)

    def expert_loads(self, layer: int, counts: Sequence[int], *, step: int | None = None) -> None:
        """Tokens this rank's own batch routed to each expert of `layer` (part of moment 4).

        `step`: where they became known later only; default: the newest.
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

    def step_ended(
        self,
        *,
        tokens: int,
        loss: float | None = None,
        is_redone: bool = False,
        transfer_s: float | None = None,
        transfer_bytes: int = 0,
        sum_len_squared: int = 0,
        outside_s: float = 0.0,
    ) -> None:
        """Moment 4: the step is committed; `tokens`, `loss` and lengths of the global batch.

        `transfer_s`, `transfer_bytes`: own time in, and bytes of, the collectives that all ranks
        entered together. What `loading` covered since the last step is part of this one;
        `outside_s`, an evaluation in the middle of it for instance, is not.
        """
        try:
            now_s = time.monotonic()
            input_s, rest_s = self.input_s, self._before_s - outside_s
            if input_s is not None:
                self.input_s = self._before_s = 0.0
            self.ring.write_payload(
                pack_step(
                    self.rank, self._step, self.generation,
                    max(0.0, now_s - self._began_s + rest_s), tokens, loss, is_redone, now_s,
                    transfer_s, transfer_bytes, sum_len_squared, input_s,
                )
            )  # fmt: skip
        except Exception as error:
            self.ring.count_error(error)

    def plan_offered(self) -> PlanOffer | None:
        """Moment 5: a plan newer than the generation in force, once its file is here and whole."""
        return self._offers.above(self.generation)

    def refuse_plan(self, generation: int, reason: str) -> None:
        """Never offer this plan again; it does not fit. Another of its generation still may.

        The controller hears of it at once, with the beginning of the reason.
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

    def probe_asked(self) -> int:
        """The number of a probe that all ranks shall run and this one has not begun; 0: none.

        Run it at a step boundary at which all ranks know of it, or none: a part would wait.
        """
        wanted = self.ring.command().probe
        return wanted if wanted > self._probed else 0

    def probe_began(self, number: int) -> None:
        """From now on this one is not asked for again, however it ends."""
        self._probed = max(self._probed, number)

    def probed(self, *, step: int, number: int, **times_s: float) -> None:
        """What this rank read: `gemm_s`, `copy_s`, `exchange_s`, and `duration_s` of all of it."""
        try:
            self.ring.write(
                ProbeRecord(
                    rank=self.rank, step=step, generation=self.generation, number=number, **times_s
                )
            )
        except Exception as error:
            self.ring.count_error(error)

    def checkpointed(
        self,
        *,
        step: int,
        outcome: str,
        duration_s: float,
        size_bytes: int = 0,
        reason: str = "",
        in_memory: bool = False,
    ) -> None:
        """What became of this rank's part of the checkpoint of `step`: complete (all of it, with
        this part), written, skipped (the one before is still being written) or failed, and why;
        `in_memory`: of a snapshot.
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
        """The ranks of the job that the fleet knows to be dead."""
        return self.ring.command().dead_ranks

    def suspect_ranks(self) -> frozenset[int]:
        """The ranks that stand on nodes with an open finding, as far as this one was told."""
        return self.ring.command().suspect_ranks

    def set_generation(self, generation: int) -> None:
        """Later records carry `generation`, and only plans above it are offered."""
        self.generation = generation

    def plan_applied(
        self,
        *,
        step: int,
        generation: int,
        layout_crc: int,
        duration_s: float = 0.0,
        moved_bytes: int = 0,
        is_regroup: bool = False,
    ) -> None:
        """This rank trains under `generation` from `step` on; later records carry it."""
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
        """The rank is done. Its ring stays for the agent to read to its end."""
        try:
            if isinstance(self.timer, LateClock):
                self._tell_late(self.timer.known())
        except Exception as error:
            self.ring.count_error(error)
        self.ring.close()

    def step(self, step: int, *, tokens: int = 0, sum_len_squared: int = 0) -> StepResult:
        """A step as a `with` block: `step_began` and, unless it raises, `step_ended`.

        What is known only inside, such as the loss, goes into the result it hands out. Told alone,
        without any micro-batch, steps have the job watched as a whole, by their lengths.
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
    ) -> MicroBatchTimer:
        """A micro-batch as a `with` block; what `waiting` covers does not count as compute."""
        return self.micro_batch_block(
            self,
            (
                tokens, sum_len_squared, expert_rows, num_active_experts, rows_over, num_documents,
                head_tokens, tensor_share,
            ),
        )  # fmt: skip

    def waiting(self) -> Waiting:
        """Around anything that waits for other ranks, inside `micro_batch_timer`."""
        return self._waiting

    def loading(self) -> Loading:
        """Around the wait for the next input, inside or outside `step`; not in a micro-batch."""
        return Loading(self)
