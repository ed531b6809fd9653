"""A rank's forward and backward passes under one layout, timed and told to the hooks."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.pipeline_schedule import Schedule, StageProgram, pipeline_program
from pacekeeper.trainer.distributed.process_group import InterruptibleProcessGroup
from pacekeeper.trainer.hooks.compute_timers import ComputeTime, PipelineClock
from pacekeeper.trainer.hooks.hooks import Hooks
from pacekeeper.trainer.toy.engine.clock_factory import FabricTimer
from pacekeeper.trainer.toy.engine.job_rules import apportion_rows, own_rows
from pacekeeper.trainer.toy.model.dataset import Batch, Corpus
from pacekeeper.trainer.toy.model.flop_counter import WorkMeter
from pacekeeper.trainer.toy.model.transformer import MoETransformer
from pacekeeper.trainer.toy.parallel.pipeline_runner import InFlightMicrobatch, Scale, StageRun
from pacekeeper.trainer.toy.parallel.stage_p2p import StageP2P


@dataclass(slots=True, kw_only=True)
class StepSums:
    """What a rank's passes of one step come to.

    loss: summed over the targets it has; `compute_s`: where the clock tells it within the step;
    counts_LE: tokens routed to each expert of the layers that are here.
    """

    counts_LE: Tensor
    loss: float = 0.0
    compute_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Passes:
    """This rank's part in every step of one layout: none where it stands by.

    Making it forms the ways between stages; all ranks of the job do so alike. Raises PeerLost.
    """

    config: TrainConfig
    model: MoETransformer
    corpus: Corpus
    device: torch.device
    meter: WorkMeter
    clock: PipelineClock
    hooks: Hooks
    fabric: InterruptibleProcessGroup
    layout: Layout
    _program: StageProgram = field(init=False)
    _crossings: StageP2P = field(init=False)

    def __post_init__(self) -> None:
        if self.fabric.rank in self.layout.standing_by:
            return
        number, at = self.layout.place_of(self.fabric.rank)
        program = pipeline_program(
            Schedule(self.config.schedule),
            num_stages=len(self.layout.pipelines[at].stages),
            num_microbatches=self.config.num_microbatches,
        )
        self._program = program.stages[number]
        self._crossings = StageP2P.of(self.layout, self.fabric)

    def run(self, step: int) -> StepSums:
        """Gradients of this rank's part of its rows add up in the parameters. Raises PeerLost."""
        config, layers = self.config, self.model.own_layers
        no_counts = torch.zeros(len(layers), config.num_experts, dtype=torch.int64)
        sums = StepSums(counts_LE=no_counts)
        if self.fabric.rank in self.layout.standing_by:
            return sums
        assert self.model.group is not None, "the model knows its layout"
        tensor_share = self.model.group.share * len(layers) / config.num_layers
        rows = own_rows(self.layout, config, self.fabric.rank)
        parts = apportion_rows(rows, config.num_microbatches)

        def load(number: int) -> Batch:
            with self.hooks.loading():
                return self.corpus.batch(step, parts[number]).to(self.device)

        def is_done(micro: InFlightMicrobatch, compute: ComputeTime | None) -> None:
            output = micro.output
            assert output is not None, "it went forward"
            if compute is not None and not compute.is_of_previous:
                sums.compute_s += compute.compute_s
            self.hooks.report_microbatch(
                compute=compute,
                tokens=micro.batch.num_tokens,
                sum_len_squared=micro.batch.sum_len_squared,
                expert_rows=output.expert_rows,
                num_active_experts=output.num_active_experts,
                rows_over=output.rows_over,
                num_documents=micro.batch.num_documents,
                head_tokens=output.head_tokens if config.num_stages > 1 else 0,
                tensor_share=tensor_share,
            )
            sums.loss += float(output.loss_sum.detach())
            sums.counts_LE += output.expert_counts.cpu()

        StageRun(
            model=self.model,
            program=self._program,
            crossings=self._crossings,
            scale=Scale(
                targets=self.corpus.target_tokens(step),
                rows=config.rows_per_step,
                balance_loss=config.balance_loss,
            ),
            meter=self.meter,
            turns=FabricTimer(self.clock, self.fabric),
            load=load,
            on_done=is_done,
        ).run()
        return sums
