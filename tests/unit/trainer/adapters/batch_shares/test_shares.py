"""Weights of losses, what a batch's tokens are, and settings that cannot work."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pacekeeper.core.errors import ConfigError
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.attachment import Capability
from pacekeeper.trainer.adapters import reporter
from pacekeeper.trainer.adapters.batch_shares import BatchShares, ShareSchedule
from pacekeeper.trainer.adapters.batch_shares.gradient_sync import gradient_sync
from pacekeeper.trainer.adapters.batch_shares.shares import counter_of, shifted_tokens_in, tokens_in


def made(
    tmp_path: Path, told: list[tuple[int, ...]] | None = None, model: nn.Module | None = None
) -> BatchShares:
    """Shares of a rank beside another one that says what `told` has, or the same."""
    pace = reporter.attach(
        job="j", device=torch.device("cpu"), rank=0, world_size=1, ring_dir=str(tmp_path),
        micro_batches_per_step=2,
    )  # fmt: skip
    schedule = ShareSchedule(rank=0, num_ranks=1, micro_batches_per_step=2)
    others = iter(told) if told else None
    return BatchShares(
        pace,
        model or nn.Linear(1, 1),
        schedule,
        gather=lambda own: [tuple(own)] if others is None else [tuple(own), next(others)],
    )


def test_the_attachment_opts_in_to_micro_batches_only(tmp_path: Path) -> None:
    shares = made(tmp_path)
    path = shares._session._hooks.ring.path
    assert path is not None
    attachment = shm_ring.decode_header(path.read_bytes()[: shm_ring.SLOTS_OFFSET])
    assert attachment.capabilities == {Capability.MICROBATCH_COUNTS}
    assert attachment.model is not None and attachment.model.rows_per_step == 2
    watched = reporter.attach(
        job="w", device=torch.device("cpu"), rank=0, world_size=1, ring_dir=str(tmp_path)
    )
    assert watched.ring.path is not None
    header = watched.ring.path.read_bytes()[: shm_ring.SLOTS_OFFSET]
    assert shm_ring.decode_header(header).capabilities == frozenset()
    assert b"plan_kinds" not in header  # agents from before this field read it, too


def test_a_loss_counts_by_its_part_of_all_tokens(tmp_path: Path) -> None:
    # The other rank has 5 of 8 tokens; first both compare settings.
    shares = made(tmp_path, [(0, 2), (0, 5, 1, 0, 0)])
    batches = [torch.zeros(1), torch.zeros(2)]
    scaled = [float(shares.scale(torch.tensor(1.0))) for _ in shares.micro_batches(batches)]
    assert scaled == [1 / 8, 2 / 8]  # times ranks, which is 1 here
    assert shares.step == 1


def test_a_mean_over_nothing_is_no_number_and_counts_nothing(tmp_path: Path) -> None:
    shares = made(tmp_path, [(0, 2), (0, 3, 1, 0, 0)])
    weight = torch.ones(2, requires_grad=True)
    for batch in shares.micro_batches([torch.zeros(0), torch.zeros(0)]):
        shares.backward((weight.sum() * batch).mean())
    assert weight.grad is not None and weight.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("own", "told", "message"),
    [
        ([torch.zeros(1)], [(0, 2)], "1 micro-batches, this rank's share is 2"),
        ([torch.zeros(1)] * 2, [(0, 2), (1, 9, 2, 0, 0)], r"ranks are at steps \[0, 1\]"),
    ],
)
def test_ranks_that_train_something_else_end(
    tmp_path: Path, own: list[Any], told: list[tuple[int, ...]], message: str
) -> None:
    shares = made(tmp_path, told)
    with pytest.raises(ConfigError, match=message):
        list(shares.micro_batches(own))


def test_other_settings_on_another_rank(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="begins at step 0 with 2"):
        made(tmp_path, [(4, 2)])


def test_ranks_whose_gradients_nothing_averages() -> None:
    with pytest.raises(ConfigError, match="gradients of 2 ranks are not averaged"):
        gradient_sync(nn.Linear(1, 1), 2)


def test_tokens_of_a_batch() -> None:
    ids = torch.zeros(2, 3)
    labels = torch.tensor([[1, -100, 2], [-100, -100, 3]])
    assert tokens_in({"input_ids": ids, "labels": labels}) == 3
    assert tokens_in({"input_ids": ids}) == tokens_in(ids) == 6
    with pytest.raises(ConfigError, match="a tuple"):
        tokens_in((ids, labels))


SIZES = {"vocab_size": 32, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


def causal_model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(**SIZES, **DROPOUT)
    model: nn.Module = transformers.GPT2LMHeadModel(config).double()
    return model


def ragged(rank: int) -> list[dict[str, torch.Tensor]]:
    """Two micro-batches of a rank: 12 labels of 16 in the first row of rank 1, 3 in others."""
    found = []
    for number in range(2):
        draw = torch.Generator().manual_seed(10 * rank + number)
        ids = torch.randint(32, (1, 16), generator=draw)
        kept = 12 if (rank, number) == (1, 0) else 3
        found.append({"input_ids": ids, "labels": ids.where(torch.arange(16) < kept, -100)})
    return found


def test_gradients_of_a_causal_model_of_transformers_are_those_of_the_whole_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # its loss asks for float32
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(causal_model())
        for rank, others in ((0, 11 + 2), (1, 2 + 2)):  # the gradients of both ranks add up
            shares = made(tmp_path, [(0, 2), (0, others, 2, 0, 0)], model)
            for batch in shares.micro_batches(ragged(rank)):
                shares.backward(model(**batch).loss)
        sharded: Any = fully_shard(causal_model())
        assert counter_of(model) is counter_of(sharded) is shifted_tokens_in
    finally:
        dist.destroy_process_group()
    alone = causal_model()
    rows = [*ragged(0), *ragged(1)]
    alone(**{name: torch.cat([row[name] for row in rows]) for name in rows[0]}).loss.backward()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=0.0, atol=1e-9)


def test_what_counts_the_tokens_of_a_model() -> None:
    causal = causal_model()
    assert counter_of(causal) is counter_of(torch.compile(causal)) is shifted_tokens_in  # type: ignore[arg-type]
    assert counter_of(nn.Linear(1, 1)) is tokens_in
    with pytest.raises(ConfigError, match="no labels"):
        shifted_tokens_in({"input_ids": torch.zeros(1, 2)})
    small = transformers.BertConfig(
        vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="BertForMaskedLM of transformers"):
        counter_of(transformers.BertForMaskedLM(small))
    with pytest.raises(ConfigError, match="GPT2LMHeadModel of transformers"):
        counter_of(nn.Sequential(causal))  # whose loss may be any
