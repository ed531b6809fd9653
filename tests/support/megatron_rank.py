"""One rank of a tiny MoE job on the real Megatron-Core, on CPU and gloo, watched by our adapter.

`python -m support.megatron_rank CASE.json RANK`. Megatron-Core asks for CUDA by name: in here, and
in here only, "cuda" means the CPU, and streams and events are of no consequence.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from support.foreign_ranks import Case, Device, batches_of, begin


class CudaIsTheCpu(TorchFunctionMode):
    """Tensors that are asked for on "cuda" are made on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class NoStream:
    """A stream, an event, and a random state where there is one device only."""

    def __init__(self, **options: object) -> None: ...

    def fork(self, name: str = "") -> Any:
        return contextlib.nullcontext()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: NoStream()


def stand_in_for_cuda() -> None:
    """What Megatron-Core calls of `torch.cuda` and of Transformer Engine's absence."""
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = NoStream
    cuda.current_stream = lambda *args: NoStream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.synchronize = lambda *args: None
    cuda.current_device = lambda: "cpu"
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda self, stream: None
    from megatron.core.tensor_parallel import (  # type: ignore[import-not-found,unused-ignore]
        random as random_states,
    )
    from megatron.core.transformer.moe import (  # type: ignore[import-not-found,unused-ignore]
        moe_utils,
        token_dispatcher,
    )

    moe_utils.te_general_gemm = None
    token_dispatcher.maybe_move_tensor_to_cpu = _on_host
    random_states.initialize_rng_tracker()
    random_states._CUDA_RNG_STATE_TRACKER = NoStream()


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def main() -> None:
    case, rank = begin(sys.argv)
    torch.distributed.init_process_group("gloo")
    from megatron.core import (  # type: ignore[import-not-found,unused-ignore]
        parallel_state,
        timers,
    )

    from pacekeeper.trainer.adapters import megatron

    stand_in_for_cuda()
    size = case["world_size"]
    stages = size if case["kind"] == "pipeline" else 1
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=stages, expert_model_parallel_size=size // stages
    )
    with CudaIsTheCpu():
        model = _model(size, stages)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        mine = timers.Timers(0, "max") if case["kind"] == "timers" else None
        model.config.timers = mine
        watch = megatron.watch(
            [model], job=case["job"], optimizer=optimizer, first_step=3, ring_dir=case["rings"]
        )
        _train(model, optimizer, case, rank, watch.fed)
        watch.close()
        assert model.config.timers is mine
        assert "step" not in vars(optimizer)
    torch.distributed.destroy_process_group()
    assert watch.reporter.pace.ring.num_errors == 0, watch.reporter.pace.ring.reason


def _model(size: int, stages: int) -> Any:
    from megatron.core import (  # type: ignore[import-not-found,unused-ignore]
        parallel_state,
    )
    from megatron.core.models.gpt import (  # type: ignore[import-not-found,unused-ignore]
        GPTModel,
        gpt_layer_specs,
    )
    from megatron.core.transformer import (  # type: ignore[import-not-found,unused-ignore]
        transformer_config,
    )

    config = transformer_config.TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=size // stages,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        add_bias_linear=False,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=gpt_layer_specs.get_gpt_layer_local_spec(
            num_experts=4, moe_grouped_gemm=False
        ),
        vocab_size=64,
        max_sequence_length=1024,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def _train(
    model: Any, optimizer: Any, case: Case, rank: int, fed: Callable[[Any], Iterator[Tensor]]
) -> None:
    from megatron.core.pipeline_parallel import (  # type: ignore[import-not-found,unused-ignore]
        get_forward_backward_func,
    )

    device = Device(case, rank)
    for layer in model.decoder.layers:
        device.takes_rows_of(layer.mlp.experts)

    def forward_step(batches: Iterator[Tensor], model: Any) -> Any:
        tokens = next(batches)
        device.takes_sequences(tokens)
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        output = model(tokens, places, None, labels=tokens)
        return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

    def run(batches: list[Tensor], *, forward_only: bool) -> None:
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=fed(iter(batches)),
            model=[model],
            num_microbatches=len(batches),
            seq_length=batches[0].shape[1],
            micro_batch_size=batches[0].shape[0],
            forward_only=forward_only,
        )

    for step in range(case["steps"]):
        device.begin_step(step)
        optimizer.zero_grad()
        run(batches_of(case, rank, step), forward_only=False)
        optimizer.step()
        if step in case["evaluates_after"]:
            model.eval()
            with torch.no_grad():
                run(batches_of(case, rank, 0), forward_only=True)
            model.train()


if __name__ == "__main__":
    main()
