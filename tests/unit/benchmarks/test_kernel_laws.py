"""The benchmark of the kernel laws: halves that share no shape, and errors of what is measured."""

import csv
import gzip
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks import kernel_laws
from benchmarks.kernel_laws import FITTED_FILE, errors_of, measurements

from pacekeeper.core.kernel_laws.kernels import Product
from pacekeeper.core.kernel_laws.laws import H100, kernel_s

TOKENS, PARTS = (256, 1024, 2048), (1, 2, 4)


def write(path: Path) -> Path:
    """A file of Vidur in which each kernel takes what the table says."""
    sizes = {"n_embd": 8192, "n_expanded_embd": 28672, "n_head": 64, "n_kv_head": 8}
    rows = []
    for parts in PARTS:
        for tokens in TOKENS:
            row: dict[str, object] = {
                "num_tokens": tokens,
                "num_tensor_parallel_workers": parts,
            } | {name: str(value) for name, value in sizes.items()}
            text = {name: str(value) for name, value in row.items()}
            for column, kernel in kernel_laws._kernels(text, parts):
                row[f"time_stats.{column}.median"] = round(kernel_s(kernel, H100) * 1e3, 3)
            rows.append(row)
    with gzip.open(path, "wt") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_the_half_that_is_fitted_shares_no_shape_with_the_other(tmp_path: Path) -> None:
    measured = measurements(write(tmp_path / FITTED_FILE))
    products = [one for one in measured if isinstance(one.kernel, Product)]
    shapes = {True: set[tuple[int, int]](), False: set[tuple[int, int]]()}
    for one in products:
        assert isinstance(one.kernel, Product)
        shapes[one.is_fitted].add((one.kernel.inputs, one.kernel.outputs))
    assert not shapes[True] & shapes[False]
    assert abs(len(shapes[True]) - len(shapes[False])) <= 2
    assert not any(one.is_fitted for one in measurements(write(tmp_path / "h100_other_mlp.csv.gz")))


def test_errors_are_those_of_the_device(tmp_path: Path) -> None:
    products = [
        one
        for one in measurements(write(tmp_path / FITTED_FILE))
        if isinstance(one.kernel, Product)
    ]
    assert errors_of(products, H100)["p95"] < 0.06  # the file has whole microseconds
    law = replace(
        H100.product,
        tile_flops_per_s={k: v / 2 for k, v in H100.product.tile_flops_per_s.items()},
    )
    assert errors_of(products, replace(H100, product=law))["p95"] > 0.5
