"""What the trainer asks of transformers: refusals of bad input, experts by slot in float64."""

import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from pacekeeper.core.errors import ConfigError
from pacekeeper.trainer.model import library
from pacekeeper.trainer.model.blocks import BlockStore
from pacekeeper.trainer.model.initialization import SeededInitialization
from pacekeeper.trainer.model.skeleton import build_skeleton
from support.tiny_models import run_by_slot, tiny_config


def experts_of(family: str, dtype: torch.dtype, **own: object) -> torch.nn.Module:
    skeleton = build_skeleton(tiny_config(family, **own), dtype)
    layer = skeleton.experts[1]
    assert layer is not None
    held = [{e: e for e in range(4)} if one else {} for one in skeleton.experts]
    BlockStore(skeleton, num_slots=4).materialize(held, SeededInitialization(skeleton, 1))
    for parameter in layer.module.parameters():
        torch.nn.init.normal_(parameter.data, std=0.2)
    return layer.module


def eager(module: torch.nn.Module, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The library's own loop over experts, without its interface."""
    forward: Callable[..., torch.Tensor] = type(module).forward.__wrapped__  # type: ignore[attr-defined]
    return forward(module, rows, slots[:, None], rows.new_ones(len(rows), 1))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral"])
def test_rows_by_slot_agree_with_the_eager_loop_in_float64(family: str) -> None:
    module = experts_of(family, torch.float64)
    rows = torch.randn(13, 64, dtype=torch.float64, requires_grad=True)
    slots = torch.tensor([3, 1, 1, 0, 3, 3, 0, 1, 3, 0, 1, 1, 3])  # slot 2 gets no row
    target = torch.randn(13, 64, dtype=torch.float64)
    results = []
    for run in (run_by_slot, eager):
        out = run(module, rows, slots)
        gradients = torch.autograd.grad((out * target).sum(), [rows, *module.parameters()])
        results.append([out, *gradients])
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12 * float(theirs.detach().abs().max()))
    assert all(one[2].abs().max() == 0 for one in results[0][2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_no_row_at_all_gives_gradients_of_zero(dtype: torch.dtype) -> None:
    module = experts_of("gpt_oss", torch.float32).to(dtype)
    rows = torch.zeros(0, 64, dtype=dtype, requires_grad=True)
    out = run_by_slot(module, rows, torch.zeros(0, dtype=torch.int64))
    assert tuple(out.shape) == (0, 64)
    out.sum().backward()
    assert all(one.grad is not None and not one.grad.any() for one in module.parameters())


def test_gradients_that_a_kernel_leaves_unwritten_are_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Careless(torch.autograd.Function):
        """Grouped products with a gradient of the weights that is written nowhere."""

        @staticmethod
        def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, _: Any) -> torch.Tensor:
            ctx.shape = weight.shape
            return rows.new_zeros(len(rows), weight.shape[-1])

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            return None, gradients[0].new_full(ctx.shape, torch.nan), None

    def careless(rows: torch.Tensor, weight: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        return Careless.apply(rows, weight, offs)  # type: ignore[no-any-return, no-untyped-call]

    module = experts_of("qwen3_moe", torch.float32)
    monkeypatch.setattr(library, "leaves_gradients_unwritten", lambda _: True)
    monkeypatch.setattr("transformers.integrations.moe._grouped_mm", careless)
    slots = torch.tensor([0, 0, 3])
    run_by_slot(module, torch.randn(3, 64), slots).sum().backward()
    for one in module.parameters():
        assert one.grad is not None
        assert not one.grad[[1, 2]].any() and bool(one.grad[[0, 3]].isnan().all())


def test_one_slot_takes_all_rows() -> None:
    skeleton = build_skeleton(tiny_config("qwen3_moe"))
    BlockStore(skeleton, num_slots=1).materialize(
        [{2: 0}, {1: 0}], SeededInitialization(skeleton, 1)
    )
    experts = skeleton.experts[0]
    assert experts is not None
    rows = torch.randn(5, 64)
    out = run_by_slot(experts.module, rows, torch.zeros(5, dtype=torch.int64))
    assert torch.allclose(out, eager(experts.module, rows, torch.zeros(5, dtype=torch.int64)))
    assert out.abs().max() > 0
    none = run_by_slot(experts.module, rows[:0], torch.zeros(0, dtype=torch.int64))
    assert tuple(none.shape) == (0, 64)


def test_expanded_gradients_are_taken() -> None:
    module = experts_of("qwen3_moe", torch.float32)
    rows = torch.randn(6, 64, requires_grad=True)
    run_by_slot(module, rows, torch.tensor([0, 1, 2, 3, 0, 0])).sum().backward()
    assert rows.grad is not None
    assert rows.grad.abs().max() > 0


@pytest.mark.parametrize("inner", [61, 30])
def test_sizes_that_the_kernel_refuses_are_computed(inner: int) -> None:
    module = experts_of("qwen3_moe", torch.float32, moe_intermediate_size=inner)
    rows = torch.randn(6, 64, requires_grad=True)
    slots = torch.tensor([0, 1, 2, 3, 0, 0])
    out = run_by_slot(module, rows, slots)
    out.sum().backward()
    assert torch.allclose(out, eager(module, rows, slots), atol=1e-5)


def test_low_precision_products_return_gradients_of_the_masters() -> None:
    module = experts_of("gpt_oss", torch.float32)
    rows = torch.randn(6, 64, requires_grad=True)
    slots = torch.tensor([0, 1, 2, 3, 0, 0])
    out = run_by_slot(module, rows, slots, torch.bfloat16)
    out.sum().backward()
    exact = run_by_slot(module, rows, slots)
    assert out.dtype is torch.float32
    assert not torch.equal(out, exact)
    assert torch.allclose(out, exact, atol=0.05 * float(exact.detach().abs().max()))
    assert all(
        one.grad is not None and one.grad.dtype is torch.float32 for one in module.parameters()
    )


def test_a_folder_or_values_or_an_object_give_a_configuration(tmp_path: Path) -> None:
    values = tiny_config("mixtral")
    config = library.load_config(values)
    config.save_pretrained(tmp_path)
    for source in (tmp_path, str(tmp_path), values, config):
        assert library.load_config(source).num_local_experts == 4
    assert library.load_config(config) is not config


@pytest.mark.parametrize(
    "source",
    [
        "no/such/folder",
        "mistralai/Mixtral-8x7B-v0.1",
        {},
        {"model_type": "of_nobody"},
        {"model_type": "deepseek_v3", "num_hidden_layers": "four"},
        {"model_type": "of_nobody", "auto_map": {"AutoConfig": "own.Config"}},
    ],
    ids=["folder", "hub", "empty", "unknown", "value", "own_code"],
)
def test_a_configuration_that_is_none_is_refused(source: str | dict[str, object]) -> None:
    with pytest.raises(ConfigError) as refused:
        library.load_config(source)
    assert refused.value.remedy


def test_code_of_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "of_nobody", "auto_map": {"AutoConfig": "own.Config"}}'
    )
    (tmp_path / "own.py").write_text("raise SystemExit('run')\n")
    with pytest.raises(ConfigError):
        library.load_config(tmp_path)


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "dbrx"},
        {"model_type": "llama4_text", "num_hidden_layers": 2},
        {"model_type": "jetmoe", "num_hidden_layers": 2},
        {"model_type": "vit"},
    ],
    ids=["dbrx", "llama4", "jetmoe", "no_tokens"],
)
def test_a_family_without_the_experts_interface_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as refused:
        build_skeleton(values)
    assert refused.value.remedy


def test_a_dense_model_is_allowed() -> None:
    skeleton = build_skeleton(tiny_config("llama"))
    assert skeleton.experts == (None, None)
    assert skeleton.num_experts == 0


@pytest.mark.parametrize("version", ["4.57.1", "5.22.9", "5.24.0", None])
def test_another_version_of_the_library_is_refused(
    version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ModuleType("transformers")
    other.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", other if version else None)
    spec = spec_from_file_location("library_again", library.__file__)
    assert spec is not None and spec.loader is not None
    with pytest.raises(ConfigError) as refused:
        spec.loader.exec_module(module_from_spec(spec))
    assert library.VERSIONS in refused.value.remedy
