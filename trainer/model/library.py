"""The one module that imports transformers: its models, its experts interface, its conversions.

Some of the functions used here are half private, so the version is checked at import. Models and
configurations come from local paths and objects only: nothing is downloaded and no code of a
checkpoint is run.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from math import gcd
from pathlib import Path
from typing import Any

import torch

from pacekeeper.core.errors import ConfigError

VERSIONS = "transformers>=5.23,<5.24"
EXPERTS = "pacekeeper"
"""The name of the experts implementation in the library's registry."""

_FUNCTION = "_pacekeeper_experts"  # attribute of a layer's experts
_REMEDY = f"install the tested versions: pip install '{VERSIONS}'"


def _check_version(version: str) -> None:
    if not version.startswith("5.23."):
        raise ConfigError(
            f"transformers {version} is installed: the trainer's models use functions that other "
            "versions may lack",
            remedy=_REMEDY,
        )


try:
    import transformers

    _check_version(transformers.__version__)
    from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, masking_utils
    from transformers import conversion_mapping as conversion_mapping  # conversions.py uses them
    from transformers import core_model_loading as core_model_loading
    from transformers.integrations import moe
    from transformers.models.auto import modeling_auto
    from transformers.utils.output_capturing import OutputRecorder
except ImportError as error:
    raise ConfigError(f"transformers cannot be imported: {error}", remedy=_REMEDY) from error

VERSION: str = transformers.__version__
Config = Any  # transformers.PreTrainedConfig
ExpertsFunction = Callable[
    [torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]
"""(module, hidden [T, H], expert indices [T, K] int64, weights [T, K]) -> [T, H]."""

_TOP_K = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
# In the order in which they are tried: what computes logits of tokens.
_MODEL_CLASSES = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
)


def load_config(source: Path | str | Mapping[str, Any] | Config) -> Config:
    """A model's configuration, from a folder, the content of a config.json, or as an object.

    Args:
        source: a folder with config.json, its content, or a configuration (which is copied).

    Raises:
        ConfigError: the folder lacks a config.json, the library does not know the model, or the
            values do not fit it.
    """
    if isinstance(source, PreTrainedConfig):
        return deepcopy(source)
    try:
        if isinstance(source, Mapping):
            values = dict(source)
            return AutoConfig.for_model(str(values.pop("model_type", "")), **values)
        if not (Path(source) / "config.json").is_file():
            raise ConfigError(
                f"{source} is no folder with a config.json",
                remedy="give a local folder of a Hugging Face model; nothing is downloaded",
            )
        return AutoConfig.from_pretrained(
            str(Path(source)), local_files_only=True, trust_remote_code=False
        )
    except ConfigError:
        raise
    except Exception as error:  # the library raises many kinds, of its validators too
        raise ConfigError(
            f"the model's configuration is refused by transformers: {_first_line(error)}",
            remedy="give a model_type of transformers and values that fit it; "
            "models with code of their own (trust_remote_code) are not run",
        ) from error


def _check_sizes(config: Config) -> None:
    """Refuse sizes that the library builds, and that fail in the first forward pass."""
    try:
        values = config.get_text_config().to_dict()
    except ValueError as error:  # several parts of the model have text
        raise ConfigError(
            f"{config.model_type} is no single language model: {_first_line(error)}",
            remedy="give the configuration of a language model",
        ) from error
    heads, groups = values.get("num_attention_heads"), values.get("num_key_value_heads")
    chosen = next((values[name] for name in _TOP_K if values.get(name)), 0)
    most = min(expert_counts(config).values(), default=chosen)
    wrong = ""
    if isinstance(heads, int) and isinstance(groups, int) and groups and heads % groups:
        wrong = f"{heads} attention heads do not divide among {groups} key-value heads"
    elif isinstance(chosen, int) and chosen > most:
        wrong = f"{chosen} experts per token of {most}"
    if wrong:
        raise ConfigError(f"{config.model_type}: {wrong}", remedy="correct the configuration")


def build_on_meta(config: Config, dtype: torch.dtype) -> PreTrainedModel:
    """The model of `config` on the meta device, its experts computed by our implementation.

    Args:
        config: the configuration; a copy is used.
        dtype: data type of the parameters.

    Raises:
        ConfigError: the library has no language model for `config` or cannot build it, or its
            experts have no experts interface.
    """
    model_class = _model_class(config)
    _check_sizes(config)
    counts = expert_counts(config)
    if counts and not model_class._can_set_experts_implementation():
        fields = ", ".join(f"{name} = {count}" for name, count in sorted(counts.items()))
        raise ConfigError(
            f"{config.model_type} has experts ({fields}) without the experts interface of "
            "transformers: its experts cannot be moved",
            remedy="train a family of docs/models.md",
        )
    config = deepcopy(config)
    try:
        with torch.device("meta"):
            return model_class._from_config(
                _config_for(model_class, config), dtype=dtype, experts_implementation=EXPERTS
            )
    except Exception as error:
        raise ConfigError(
            f"transformers cannot build {config.model_type}: {_first_line(error)}",
            remedy="correct the model's configuration",
        ) from error


def _model_class(config: Config) -> Any:
    for mapping in _MODEL_CLASSES:
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise ConfigError(
        f"transformers has no model with a head over tokens for {config.model_type!r}",
        remedy="give the configuration of a language model",
    )


def _config_for(model_class: Any, config: Config) -> Config:
    """The part of `config` that `model_class` is built of: some need the text part only."""
    wanted = model_class.config_class
    if isinstance(config, wanted):
        return config
    text = config.get_text_config()
    return text if isinstance(text, wanted) else config


def _first_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def config_text(model: PreTrainedModel, dtype: torch.dtype | None) -> str:
    """The content of the config.json of a checkpoint of `model`.

    Args:
        model: the model.
        dtype: data type of the checkpoint; None: as the model was built.
    """
    config = deepcopy(model.config)
    config.architectures = [type(model).__name__]
    if dtype is not None:
        config.dtype = dtype
    return str(config.to_json_string())


def is_experts(module: torch.nn.Module) -> bool:
    """Whether `module` holds stacked experts behind the library's experts interface."""
    return hasattr(module, "_is_expert_parallel") and hasattr(module, "has_gate")


def use_library_experts(module: torch.nn.Module, implementation: str = "grouped_mm") -> None:
    """Let one experts module compute by the library's own forward, not by ours.

    Args:
        module: experts of the library, with all experts in order.
        implementation: a name of the library's registry, or "eager" for the family's own loop.
    """
    config: Config = deepcopy(module.config)
    config._experts_implementation = implementation
    module.config = config


def num_layers(config: Config) -> int:
    """The number of decoder layers that the configuration gives; 0 where it gives none."""
    return int(getattr(config.get_text_config(), "num_hidden_layers", None) or 0)


def config_values(model: PreTrainedModel) -> dict[str, Any]:
    """The configuration of a model, without the path that it was read from."""
    values: dict[str, Any] = model.config.to_dict()
    values.pop("_name_or_path", None)
    return values


def finest_shards(source: Path | str) -> tuple[int, int]:
    """The most virtual shards that a configuration's heads and columns divide into.

    Args:
        source: a folder with config.json.

    Returns:
        Shards of attention, each with at least one head of keys, and of dense MLPs, at most 64.
    """
    text = load_config(source).get_text_config()
    heads = int(getattr(text, "num_attention_heads", None) or 1)
    groups = getattr(text, "num_key_value_heads", None) or heads
    widths = [v for k, v in text.to_dict().items() if k.endswith("intermediate_size") and v]
    columns = gcd(*(width for width in widths if isinstance(width, int))) or 1
    return gcd(heads, int(groups)), max(n for n in range(1, 65) if columns % n == 0)


def vocabulary_size(model: PreTrainedModel) -> int:
    """The number of tokens that the model has embeddings for."""
    return int(model.get_input_embeddings().num_embeddings)


def hidden_size(model: PreTrainedModel) -> int:
    """The size of a token's embedding."""
    return int(model.get_input_embeddings().embedding_dim)


def experts_per_token(config: Config) -> int:
    """The experts that a router chooses for each token; 1 where the configuration does not say."""
    text = config.get_text_config()
    for name in ("num_experts_per_tok", "moe_topk", "top_k_experts"):
        value = getattr(text, name, None)
        if isinstance(value, list):
            value = max(value, default=0)
        if isinstance(value, int) and value > 0:
            return value
    return 1


def attention_shape(module: torch.nn.Module, config: Config) -> tuple[int, int, int] | None:
    """Heads, head size and window (0: none) of a module that attends; None for all others.

    Where queries and values differ in size, the mean.
    """
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not type(module).__name__.endswith("Attention") or not isinstance(heads, int):
        return None
    size: Any = getattr(module, "head_dim", None) or text.hidden_size // heads
    of_queries: Any = getattr(module, "qk_head_dim", None)
    if of_queries is not None:
        size = (of_queries + getattr(module, "v_head_dim", of_queries)) // 2
    window: Any = getattr(module, "sliding_window", None)
    return heads, int(size), int(window or 0)


def output_head(model: PreTrainedModel) -> torch.nn.Module | None:
    """The module that computes logits of tokens."""
    head: torch.nn.Module | None = model.get_output_embeddings()
    return head


def expert_counts(config: Config) -> dict[str, int]:
    """The configuration's fields that give a number of experts above 1, by name."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    text = config.get_text_config()
    nested = getattr(text, "ffn_config", None)  # DBRX
    found = {}
    for one in (text, nested):
        for name in names:
            value = getattr(one, name, None)
            if isinstance(value, int) and value > 1:
                found[name] = value
    return found


def initialize_module(model: PreTrainedModel, name: str) -> None:
    """Draw the tensors of one module, as the library does for a new model.

    Tensors on the meta device stay as they are, so that only what was made real is drawn. The
    modules above come after it: some families initialize a child's tensors in a parent.

    Args:
        model: the model.
        name: the module's name.
    """
    path = [""]
    for part in name.split(".") if name else []:
        path.append(f"{path[-1]}.{part}".removeprefix("."))
    owner = model  # the model that a module is a part of: its rule holds
    pairs = []
    for module in map(model.get_submodule, path):
        owner = module if isinstance(module, PreTrainedModel) else owner
        pairs.append((owner, module))
    with torch.no_grad():
        for owner, module in reversed(pairs):
            owner._init_weights(module)


def materialize_unsaved_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers that no checkpoint holds (frequencies of rotary embeddings, masks).

    Must be called while all parameters are on the meta device.
    """
    for name, module in list(model.named_modules()):
        unsaved = [one for one in module._non_persistent_buffers_set if one in module._buffers]
        real = {}
        for one in unsaved:
            buffer = module._buffers[one]
            if buffer is not None and buffer.is_meta:
                real[one] = torch.zeros_like(buffer, device="cpu")
                module._buffers[one] = real[one]
        if real:
            initialize_module(model, name)
            for one in real:
                module._buffers[one] = module._buffers[one].to(device)


def set_experts_function(module: torch.nn.Module, function: ExpertsFunction) -> None:
    """Make `function` compute the experts of one layer.

    Args:
        module: experts of the library.
        function: what computes them.
    """
    setattr(module, _FUNCTION, function)


def router_classes(model: PreTrainedModel) -> dict[type[torch.nn.Module], int]:
    """The classes of routers by the library's records, and where logits are in their outputs."""
    found = {}
    for module in model.modules():
        records = getattr(module, "_can_record_outputs", None) or {}
        record = records.get("router_logits") if isinstance(module, PreTrainedModel) else None
        for one in record if isinstance(record, list) else [record]:
            if isinstance(one, OutputRecorder):
                found[one.target_class] = one.index
    return found


def is_recurrent(model: PreTrainedModel) -> bool:
    """Whether layers of the model carry a state along a row (state space, linear attention)."""
    return any(getattr(module, "_is_stateful", False) for module in model.modules())


def document_masks(config: Config, like: torch.Tensor, position_ids: torch.Tensor) -> Any:
    """Attention masks by kind of layer that keep the documents of each row apart.

    Args:
        config: the model's configuration.
        like: [B, S, ...], a tensor of the data type and device of the hidden states.
        position_ids: [B, S] int64, starting again at 0 with each document.
    """
    given = {
        "config": config,
        "inputs_embeds": like,
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": position_ids,
    }
    return {
        "full_attention": masking_utils.create_causal_mask(**given),
        "sliding_attention": masking_utils.create_sliding_window_causal_mask(**given),
    }


def register_experts_function(function: ExpertsFunction) -> None:
    """Make `function` compute the experts of all layers that have no function of their own."""
    moe.ALL_EXPERTS_FUNCTIONS.register(
        EXPERTS,
        lambda module, *inputs: getattr(module, _FUNCTION, function)(module, *inputs),
    )


def _no_function(module: torch.nn.Module, *_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError(f"{type(module).__name__}: set_experts_function was not called")


def checkpoint_activations(
    model: PreTrainedModel,
    contexts: Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]],
) -> None:
    """Repeat the decoder layers in the backward pass instead of keeping their activations.

    Args:
        model: the model.
        contexts: makes the contexts of a layer's first pass and of its repetition.

    Raises:
        ConfigError: the library cannot do it for this family.
    """
    try:
        model.activation_checkpointing_enable(
            # Not stopped early: ranks must repeat the same exchanges.
            {"use_reentrant": False, "early_stop": False, "context_fn": contexts}
        )
    except ValueError as error:
        raise ConfigError(
            f"{model.config.model_type}: {_first_line(error)}",
            remedy="train it without activation checkpointing",
        ) from error


def run_grouped_experts(
    module: torch.nn.Module,
    rows: torch.Tensor,
    counts: torch.Tensor,
    cast: Callable[[torch.nn.Parameter, torch.dtype], torch.Tensor] = torch.Tensor.to,
    run: Callable[..., torch.Tensor] = lambda compute, *given: compute(*given),
) -> torch.Tensor:
    """Compute rows that are sorted by slot: the library's grouped forward without its sorting.

    Gate, bias and transposition are the family's own. Gradients reach the parameters in their own
    data type.

    Args:
        module: experts of the library, its stacked parameters [num_slots, ...].
        rows: [R, H], those of slot 0 first; their data type is that of the products.
        counts: [num_slots] int64, rows of each slot; the sum is R.
        cast: returns a parameter in another data type, differentiable.
        run: calls a function with rows and weights, and lets it compute their gradients.

    Returns:
        [R, H] in the data type of `rows`, not weighted.
    """
    own = _Slots(module, rows.dtype, cast)
    ends = counts.cumsum(0, dtype=torch.int32)
    first, second = ("gate_up_proj" if own.has_gate else "up_proj"), "down_proj"

    def product(
        values: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        found: torch.Tensor = moe._grouped_linear(
            values, weights, ends, bias=bias, is_transposed=own.is_transposed
        )
        return found

    def linear(values: torch.Tensor, name: str) -> torch.Tensor:
        weights = getattr(own, name)
        if leaves_gradients_unwritten(weights.device):
            weights = HeldSlots.apply(weights, counts)  # type: ignore[no-untyped-call]
        if not own.has_bias:
            return run(product, values, weights)
        stacked = getattr(own, f"{name}_bias")
        bias = torch.repeat_interleave(stacked, counts, dim=0, output_size=len(values))
        return run(product, values, weights, bias)

    inner = linear(rows, first)
    out = linear(own._apply_gate(inner) if own.has_gate else own.act_fn(inner), second)
    return own.post_expert_norm(out) if own.has_post_expert_norm else out


def leaves_gradients_unwritten(device: torch.device) -> bool:
    """Whether grouped products leave the gradients of weights without rows as memory was.

    So on Blackwell (pytorch issue 172439); on Hopper and on CPU they are zero.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10


class HeldSlots(torch.autograd.Function):
    """Stacked weights [S, ...] whose gradient is zero in slots without rows."""

    @staticmethod
    def forward(ctx: Any, stacked: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(counts)
        return stacked.view_as(stacked)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,), (counts,) = gradients, ctx.saved_tensors
        return gradient.masked_fill((counts == 0).view(-1, *[1] * (gradient.dim() - 1)), 0.0), None


class _Slots:
    """An experts module as the library's forward sees it, its stacks in one data type."""

    def __init__(
        self,
        module: torch.nn.Module,
        dtype: torch.dtype,
        cast: Callable[[torch.nn.Parameter, torch.dtype], torch.Tensor],
    ) -> None:
        self._module = module
        for name, parameter in module.named_parameters(recurse=False):
            setattr(self, name, cast(parameter, dtype))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _can_use_grouped_mm(
    rows: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, library: Any
) -> bool:
    """The library's test, and what it overlooks: the kernel has no float64, no unaligned rows.

    Rows of all operands, and of their gradients, must be multiples of 16 bytes. Without any row
    CUDA's kernel rejects the operands of the weights' gradient.
    """
    lengths = (rows.stride(0), *weight.shape[-2:])
    aligned = all(length * weight.element_size() % 16 == 0 for length in lengths)
    is_possible = weight.dtype != torch.float64 and aligned and len(rows) > 0
    return is_possible and bool(library(rows, weight, offs))


def _extend_library() -> None:
    own = moe._can_use_grouped_mm
    moe._can_use_grouped_mm = lambda rows, weight, offs: _can_use_grouped_mm(
        rows, weight, offs, own
    )


_extend_library()
register_experts_function(_no_function)
