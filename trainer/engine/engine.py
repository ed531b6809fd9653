"""Trains a Hugging Face mixture of experts, one step at a time, on the layout in force.

`Engine` builds this rank's part of the model, runs forward and backward passes over micro-batches,
adds up gradients, clips, steps the optimizers, and moves blocks between steps. The caller keeps
the loop, with data, loss, schedule, logging and evaluation. Failures of other ranks are not
handled here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from pacekeeper.core.checkpoint.manifest import RunFingerprint
from pacekeeper.core.config.run_fingerprint import engine_fingerprint
from pacekeeper.core.errors import ConfigError
from pacekeeper.core.layout.apportion import num_micro_batches
from pacekeeper.core.layout.codec import encode_layout
from pacekeeper.core.layout.layout import Block, Layout
from pacekeeper.trainer.checkpoint.block_states import BlockState, blocks_on, state_digest
from pacekeeper.trainer.emulation.engine_device import EngineDevice
from pacekeeper.trainer.engine.export import export_checkpoint
from pacekeeper.trainer.engine.micro_batches import Loss, MicroBatch, cross_entropy
from pacekeeper.trainer.engine.passes import Passes
from pacekeeper.trainer.engine.routing import (
    Routing,
    keep_routers_in_full_precision,
    require_balance,
)
from pacekeeper.trainer.engine.telemetry import Telemetry
from pacekeeper.trainer.engine.values import (
    AppliedLayout,
    EngineOptions,
    PreparedMove,
    PreparedStep,
    StepResult,
    require_schedule,
)
from pacekeeper.trainer.groups.agreement import on_all_ranks, require_agreement
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.hooks.hooks import Hooks
from pacekeeper.trainer.model import library
from pacekeeper.trainer.model.blocks import BlockSource, BlockStore, Holding
from pacekeeper.trainer.model.checkpoint_reader import CheckpointReader
from pacekeeper.trainer.model.initialization import SeededInitialization
from pacekeeper.trainer.model.skeleton import Skeleton, build_skeleton
from pacekeeper.trainer.parallel.block_states import TrainedBlocks
from pacekeeper.trainer.parallel.experts import ExpertParallel
from pacekeeper.trainer.parallel.gradients.dense import send_weights, weight_messages
from pacekeeper.trainer.parallel.gradients.sync import Gradients
from pacekeeper.trainer.parallel.layouts import check_layout, default_slots, start_layout
from pacekeeper.trainer.parallel.mesh.deferred_weights import DeferredWeights
from pacekeeper.trainer.parallel.mesh.row_deal import micro_batches_of, rows_of_rank
from pacekeeper.trainer.parallel.moves import assign_slots, commit_move, stage_move
from pacekeeper.trainer.parallel.optimizers import require_per_element
from pacekeeper.trainer.parallel.weight_casts import WeightCasts


class Engine:
    """This rank's part of a model on a layout, and the steps that train it.

    Build it with `from_config` or `from_pretrained`, make optimizers of its parameters, hand them
    over with `add_optimizer`, and call `step` with this rank's micro-batches on every rank.

    Attributes:
        skeleton: The model; its modules hold this rank's parameters.
        store: The blocks held here.
        layout: The layout in force.
        num_steps: Steps made so far.
        states: Blocks held here, with their optimizer state.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        source: BlockSource,
        *,
        layout: Layout | None = None,
        groups: EngineGroups | None = None,
        rank: int | None = None,
        hooks: Hooks | None = None,
        options: EngineOptions | None = None,
    ) -> None:
        """Materialise this rank's blocks.

        Args:
            skeleton: The model, from `build_skeleton`.
            source: Values of the blocks, from a seed or a checkpoint.
            layout: Replicas of the experts, and shares of the batch; default: every expert on one
                rank, in turn.
            groups: Collectives of all ranks of the layout; default: a job of one process.
            rank: Of this process, in place of `groups`, if it forms them later: `enter` follows.
            hooks: Attachment of this rank to the agent of its node; default: unwatched.
            options: How to train.

        Raises:
            ConfigError: On all ranks: layout, groups and model do not fit each other, or ranks
                differ in them.
            PacekeeperError: On all ranks: a rank cannot read its blocks.
        """
        options = options or EngineOptions()
        self.skeleton = skeleton
        self.groups = groups or EngineGroups.single_process(rank or 0)
        ranks = self.groups.exchange.ranks
        self._num_experts = [one.num_experts if one else 0 for one in skeleton.experts]
        self.layout = layout or start_layout(
            self._num_experts,
            ranks,
            num_attention_shards=skeleton.num_attention_shards,
            num_mlp_shards=skeleton.num_mlp_shards,
            shared_mlp_layers=skeleton.shared_mlp_layers,
        )
        self._num_slots = options.num_slots or default_slots(self.layout, self._num_experts)
        self._facts: dict[str, object] = {
            "version of transformers": library.VERSION,
            "version of torch": torch.__version__,
            "model": library.config_values(skeleton.module),
            "options": asdict(options) | {"device": "", "num_slots": self._num_slots},
            "type of parameters": self._dtype(),
            "weights": source.fingerprint,
        }
        # Compared before anything is checked: what is wrong is then wrong on all ranks.
        self._require_agreement(self.groups)
        self._options = options
        self.check_layout(self.layout, ranks if rank is None else self.layout.ranks)
        if self._dtype() not in (torch.float64, torch.float32, torch.bfloat16):
            raise ConfigError(
                f"parameters of type {self._dtype()} need a scaled loss, which there is not",
                remedy="use float32 with compute_dtype=torch.bfloat16",
            )
        self.device = torch.device(options.device)
        self.num_steps = 0
        self._optimizers: list[torch.optim.Optimizer] = []
        self.store = BlockStore(skeleton, num_slots=self._num_slots, device=self.device)
        own = self.groups.exchange.rank
        held = [
            assign_slots({}, self.layout.experts_on(own, layer), self._num_slots) if one else {}
            for layer, one in enumerate(skeleton.experts)
        ]
        holding = Holding.of(self.layout, own)
        on_all_ranks(lambda: self.store.materialize(held, source, holding), self.groups.control)
        # Autograd keeps the casts of a step anyway, except where it repeats the layers.
        self._casts = WeightCasts()
        cast = Tensor.to if options.checkpoint_activations else self._casts
        deferred = DeferredWeights()
        self._experts = ExpertParallel(
            group=self.groups.exchange,
            compute=partial(library.run_grouped_experts, cast=cast, run=deferred.run),
            dtype=options.compute_dtype,
        )
        for one in skeleton.experts:
            if one is not None:
                library.set_experts_function(one.module, self._experts)
        self._routing = Routing(
            skeleton,
            self._experts,
            balance=options.balance,
            weight=options.balance_weight,
            bias_rate=options.bias_rate,
        )
        if options.compute_dtype is not None:
            keep_routers_in_full_precision(skeleton, self.device.type)
        skeleton.module.train()
        if options.checkpoint_activations:
            library.checkpoint_activations(skeleton.module, self._experts.checkpoint_contexts)
        self._telemetry: Telemetry | None = None
        self._passes = Passes(
            skeleton=skeleton,
            experts=self._experts,
            routing=self._routing,
            groups=self.groups,
            device=self.device,
            compute_dtype=options.compute_dtype,
            telemetry=None,
            deferred=deferred,
        )
        if hooks is not None:
            self.watch(hooks)
        self.states = TrainedBlocks(self.store, self._optimizers)
        self._gradients = Gradients(self.states)
        self._has_unsent_weights, self._is_outside = False, rank is not None
        self._use_layout()

    def watch(self, hooks: Hooks, *, time_transfers: bool = False) -> None:
        """Report steps by this attachment; exchanges by wall time where its clock times none."""
        telemetry = Telemetry(hooks, self._experts, time_transfers=time_transfers)
        self._telemetry = self._passes.telemetry = telemetry
        if isinstance(hooks.timer, EngineDevice):
            hooks.timer.portion_of = self._passes.portion_of
            hooks.timer.is_idle = lambda: self._experts.is_idle

    def enter(self, groups: EngineGroups) -> None:
        """Be one of the ranks of `groups`, for an engine that was built outside of them.

        Raises:
            ConfigError: On all ranks: they differ in model, layout, options, versions, optimizers.
        """
        self._require_agreement(groups)
        self.groups, self._is_outside = groups, False
        self._use_layout()

    @property
    def facts(self) -> Mapping[str, object]:
        """What is equal on all ranks of this engine, by its name in messages."""
        return self._facts

    def add_facts(self, facts: Mapping[str, object]) -> None:
        """Compare more with the other ranks: when this engine enters groups, and in moves."""
        self._facts |= facts

    def _require_agreement(self, groups: EngineGroups) -> None:
        require_agreement(self._facts | {"layout": encode_layout(self.layout)}, groups.control)

    @classmethod
    def from_config(
        cls,
        config: Path | str | Mapping[str, Any] | library.Config,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        layout: Layout | None = None,
        groups: EngineGroups | None = None,
        hooks: Hooks | None = None,
        **options: Any,
    ) -> "Engine":
        """Build a model with new weights, the same for a seed on any layout.

        Args:
            config: A folder with config.json, its content, or a configuration of transformers.
            seed: Of the initial weights.
            dtype: Of parameters, gradients and optimizer state.
            layout, groups, hooks: As of `Engine`.
            options: Fields of `EngineOptions`.
        """
        groups = groups or EngineGroups.single_process()

        def make() -> tuple[Skeleton, BlockSource, EngineOptions]:
            skeleton = build_skeleton(config, dtype, **_shards(layout))
            return skeleton, SeededInitialization(skeleton, seed), EngineOptions(**options)

        skeleton, source, given = on_all_ranks(make, groups.control)
        return cls(skeleton, source, layout=layout, groups=groups, hooks=hooks, options=given)

    @classmethod
    def from_pretrained(
        cls,
        folder: Path | str,
        *,
        dtype: torch.dtype = torch.float32,
        layout: Layout | None = None,
        groups: EngineGroups | None = None,
        hooks: Hooks | None = None,
        **options: Any,
    ) -> "Engine":
        """Read this rank's blocks of a local Hugging Face checkpoint.

        Args:
            folder: With config.json and safetensors files; nothing is downloaded.
            dtype: Of parameters, gradients and optimizer state.
            layout, groups, hooks: As of `Engine`.
            options: Fields of `EngineOptions`.
        """
        groups = groups or EngineGroups.single_process()

        def make() -> tuple[Skeleton, BlockSource, EngineOptions]:
            skeleton = build_skeleton(folder, dtype, **_shards(layout))
            return skeleton, CheckpointReader(skeleton, Path(folder)), EngineOptions(**options)

        skeleton, source, given = on_all_ranks(make, groups.control)
        return cls(skeleton, source, layout=layout, groups=groups, hooks=hooks, options=given)

    @property
    def model(self) -> nn.Module:
        """The model of transformers, with this rank's parameters."""
        return self.skeleton.module

    def fingerprint(
        self, *, data: int = 0, settings: Mapping[str, object] = MappingProxyType({})
    ) -> RunFingerprint:
        """Return what the numbers of this run depend on, as checkpoints keep it.

        Call it when all optimizers are added: what they keep is a part of it.

        Args:
            data: Fingerprint of the training data.
            settings: Of the job, where numbers depend on them.
        """
        return engine_fingerprint(
            family=self.skeleton.config.model_type,
            state=state_digest(self.states, self.layout),
            config=library.config_values(self.skeleton.module),
            settings=settings,
            data=data,
            versions={"torch": torch.__version__, "transformers": library.VERSION},
        )

    def expert_parameters(self) -> list[nn.Parameter]:
        """Return the trainable stacked parameters of the experts, [slots, ...] each.

        Those of layers that other ranks run are on the meta device; optimizers skip them.
        """
        stacks = map(self.store.stacked, range(self.skeleton.num_layers))
        return [p for stack in stacks for p in stack.values() if p.requires_grad]

    def dense_parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters that are not of experts.

        Those that this rank does not hold are on the meta device; optimizers skip them.
        """
        stacks = map(self.store.stacked, range(self.skeleton.num_layers))
        experts = {id(p) for stack in stacks for p in stack.values()}
        return [p for p in self.model.parameters() if p.requires_grad and id(p) not in experts]

    def parameters(self) -> list[nn.Parameter]:
        """Return all trainable parameters of this rank, for an optimizer."""
        return [*self.dense_parameters(), *self.expert_parameters()]

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let `step` use this optimizer of some of the parameters; all ranks call it together.

        Freeze parameters (`requires_grad_(False)`) before: they are neither exchanged nor clipped.

        Raises:
            ConfigError: On all ranks: ranks differ in the optimizer or in what is frozen, it
                updates experts or tensors that are divided into shards, and not each element
                alone, or it has parameters that are not the engine's or have an optimizer already.
        """
        names = {id(p): name for name, p in self.model.named_parameters()}
        groups = optimizer.param_groups
        given = [[names.get(id(p), "") for p in group["params"]] for group in groups]
        settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        number = len(self._optimizers) + 1
        self._facts |= {
            "set of trained parameters": [names[id(p)] for p in self.parameters()],
            f"optimizer {number}": type(optimizer).__qualname__,
            f"set of parameters in optimizer {number}": given,
            f"settings of optimizer {number}": settings,
        }
        self._require_agreement(self.groups)
        own = {names[id(p)] for p in self.parameters()}
        if any(n not in own or self.states.is_trained(n) for group in given for n in group):
            raise ConfigError(
                f"{type(optimizer).__name__} has parameters that are not this engine's, or that "
                "another optimizer has",
                remedy="make it of engine.parameters(), or of engine.dense_parameters() and "
                "engine.expert_parameters()",
            )
        divided = [p for name, p in self.model.named_parameters() if name in self.skeleton.cuts]
        require_per_element([optimizer], [*self.expert_parameters(), *divided])
        self._optimizers.append(optimizer)
        if self.layout.state_owners:
            held = blocks_on(self.layout, self.groups.exchange.rank)
            self.states.load(held, {}, self.states.num_updates)
        self._use_layout()

    def rows(self, num_rows: int) -> range:
        """Return the places in a global batch of `num_rows` rows that this rank computes."""
        return rows_of_rank(self.layout, self.groups.exchange.rank, num_rows)

    def micro_batches(self, num_rows: int, rows_per_microbatch: int) -> list[range]:
        """Return the places of each micro-batch of this rank; pipelines have equally many."""
        count = num_micro_batches(self.layout.most_rows(num_rows), rows_per_microbatch)
        return list(micro_batches_of(self.rows(num_rows), count).values())

    def step(self, batch: Iterable[MicroBatch], loss: Loss = cross_entropy) -> StepResult:
        """Train one step; all ranks call it together.

        Args:
            batch: This rank's micro-batches, possibly none, of any number and size; where the
                layout has stage shares, those of `micro_batches`.
            loss: Sum of a micro-batch's losses over its targets.

        Raises:
            ConfigError: No optimizer was added.
            DataError: On all ranks, where one was given a token outside the vocabulary.
        """
        result = self.commit_step(self.prepare_step(batch, loss))
        self.send_weights()
        return result

    def prepare_step(self, batch: Iterable[MicroBatch], loss: Loss = cross_entropy) -> PreparedStep:
        """Do all of a step that other ranks have a part in; all ranks call it together.

        Parameters and optimizers do not change: a step that was not committed can be prepared
        again, with other micro-batches, after a failure too. Arguments and errors as of `step`.
        """
        self._require_optimizers()
        self.send_weights()
        for parameter in self.model.parameters():
            parameter.grad = None
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        self._gradients.sync.disarm()
        self._forget()
        batches, whole = self._passes.agree(self.num_steps, batch)
        if self._telemetry:
            self._telemetry.begin_step(self.num_steps)
        total = self._passes.train(
            batches, whole, loss, is_first=not self.num_steps, before_last=self._gradients.sync.arm
        )
        self._gradients.sync.finish()
        self._casts.forget()
        exchange = self.groups.exchange
        norm = self._gradients.clip(self._options.max_grad_norm, exchange)
        exchange.all_reduce(total).wait()
        result = StepResult(
            loss=total / max(whole.num_targets, 1),
            grad_norm=norm,
            num_targets=whole.num_targets,
            num_tokens=whole.work.tokens,
            routed=self._routing.take_rows(self.layout, exchange, self.device),
        )
        return PreparedStep(step=self.num_steps, result=result, work=whole.work)

    def commit_step(self, prepared: PreparedStep, *, is_applied: bool = True) -> StepResult:
        """Update the parameters by the gradients of a prepared step; needs no other rank.

        Where optimizer state has owners, `send_weights` brings their weights to the other ranks.

        Args:
            prepared: From `prepare_step`, the last thing that this engine did.
            is_applied: False: count the step and change nothing, on all ranks alike.
        """
        assert prepared.step == self.num_steps, "each step is committed once, in order"
        if is_applied:
            for optimizer in self._optimizers:
                optimizer.step()
            self.states.store_updates()
            self._has_unsent_weights = bool(self.layout.state_owners)
            self._routing.update_biases(prepared.result.routed)
            self.states.num_updates += 1
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        if self._telemetry:
            self._telemetry.end_step(self.num_steps, prepared.work, prepared.result.loss)
        self.num_steps += 1
        return prepared.result

    def send_weights(self, groups: EngineGroups | None = None) -> None:
        """Send weights that owners of optimizer state updated to those that have older ones.

        All ranks call it together, after a commit; once it is done it does nothing until the next.
        In new `groups`, of those who live, it sends all: a rank may have been lost in the middle.
        """
        if self._has_unsent_weights or groups is not None:
            group = (groups or self.groups).exchange
            messages = self._gradients.weight_messages
            if groups is not None:
                messages = weight_messages(self.store, self.layout, group.ranks, group.rank)
            send_weights(messages, group)
            self._casts.forget()
            self._has_unsent_weights = False

    def _require_optimizers(self) -> None:
        if not self._optimizers:
            raise ConfigError("the engine has no optimizer", remedy="call add_optimizer first")
        if self._unowned:
            raise ConfigError(
                f"{len(self._unowned)} trainable parameters have no optimizer, as "
                f"{self._unowned[0]}",
                remedy="freeze them with requires_grad_(False) before add_optimizer, or add an "
                "optimizer of them",
            )

    @torch.no_grad()
    def evaluate(self, batch: Iterable[MicroBatch], loss: Loss = cross_entropy) -> Tensor:
        """Return the mean loss over the targets of all ranks' micro-batches; all ranks call it.

        Args:
            batch: This rank's micro-batches, possibly none.
            loss: As of `step`.
        """
        self.send_weights()
        self._forget()
        batches, whole = self._passes.agree(self.num_steps, batch)
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            total = self._passes.evaluate(batches, whole, loss)
        finally:
            for module, is_training in modes.items():
                module.training = is_training
        self.groups.exchange.all_reduce(total).wait()
        self._forget()
        return total / max(whole.num_targets, 1)

    def apply(self, layout: Layout) -> AppliedLayout:
        """Change to another layout between two steps; all ranks call it with the same.

        Blocks move with their optimizer state. If it raises, the old layout is in force.

        Raises:
            ConfigError: The layout does not fit the model, the ranks or the slots.
            CorruptStateError: An expert arrived damaged on some rank.
        """
        return self.commit_move(self.prepare_move(layout))

    def prepare_move(
        self,
        layout: Layout,
        groups: EngineGroups | None = None,
        refilled: Mapping[Block, BlockState] | None = None,
    ) -> PreparedMove:
        """Fetch what this rank needs for another layout; all ranks of it call this together.

        Nothing in force changes: a move that was not committed can be prepared again.

        Args:
            layout: The next layout.
            groups: Its ranks, where others than before; default: the present ones.
            refilled: What this rank gets of blocks that no rank of `groups` holds, as from a
                checkpoint; default: each block is held by one.

        Raises:
            ConfigError: The layout does not fit the model, the ranks or the slots.
            LostStateError: No rank of `groups` holds one of the blocks.
            CorruptStateError: On all ranks: a block arrived damaged on some rank.
        """
        groups = groups or self.groups
        require_agreement(self._facts | {"layout": encode_layout(layout)}, groups.control)
        self.check_layout(layout, groups.exchange.ranks)
        self.send_weights(groups if groups is not self.groups else None)
        staged = stage_move(self.states, self.layout, layout, groups.exchange, refilled)
        return PreparedMove(layout=layout, groups=groups, staged=staged)

    def check_layout(self, layout: Layout, ranks: Sequence[int]) -> None:
        """Raise ConfigError if these ranks cannot run `layout` with this model and options."""
        check_layout(layout, self.skeleton, ranks, self._num_slots)
        require_balance(layout, self._options.balance, self._options.balance_weight)
        require_schedule(layout, checkpoint_activations=self._options.checkpoint_activations)

    def commit_move(self, prepared: PreparedMove) -> AppliedLayout:
        """Put a prepared layout in force, with its groups; needs no other rank."""
        commit_move(self.states, prepared.staged)
        self._casts.forget()
        self.layout, self.groups = prepared.layout, prepared.groups
        self._is_outside = self._has_unsent_weights = False
        self._use_layout()
        return AppliedLayout(
            generation=self.layout.generation, moved_bytes=prepared.staged.moved_bytes
        )

    def go_back(self, layout: Layout, groups: EngineGroups, step: int) -> None:
        """Continue from another step, for a caller that has loaded its state into `states`.

        Args:
            layout: Of that state.
            groups: Its ranks.
            step: Steps made.
        """
        self.layout, self.groups, self.num_steps = layout, groups, step
        self._is_outside = self._has_unsent_weights = False
        self._casts.forget()
        self._use_layout()

    def export(self, folder: Path | str, dtype: torch.dtype | None = None) -> None:
        """Write the model as a Hugging Face checkpoint; all ranks call it with a shared folder.

        No rank holds the whole model; `from_pretrained` reads it, here and in transformers.

        Args:
            folder: It holds no checkpoint yet.
            dtype: Type of floating-point tensors on disk; default: that of the parameters.

        Raises:
            PacekeeperError: It cannot be written: the family, the folder or the disk of a rank.
        """
        self.send_weights()
        export_checkpoint(self.store, self.layout, self.groups, Path(folder), dtype)

    def _dtype(self) -> torch.dtype:
        return next(self.skeleton.module.parameters()).dtype

    def _use_layout(self) -> None:
        if self._is_outside:
            return
        self._passes.use(self.layout, self.groups, self.store)
        self._gradients.use_layout(self.layout, self.groups.gradients)
        named, is_trained = self.model.named_parameters(), self.states.is_trained
        self._unowned = [n for n, p in named if p.requires_grad and not is_trained(n)]

    def _forget(self) -> None:
        """Drop what an interrupted step, or passes that are no step, left behind."""
        self._passes.forget()
        self._casts.forget()


def _shards(layout: Layout | None) -> dict[str, int]:
    """Virtual shards of a model, as its layout has them."""
    if layout is None:
        return {}
    return {
        "num_attention_shards": layout.num_attention_shards,
        "num_mlp_shards": layout.num_mlp_shards,
    }
