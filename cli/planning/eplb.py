"""Plans in EPLB's form: `pacekeeper plan eplb`, and the files that it and `plan placement` write.

A file holds EPLB's tables by name: `phy2log`, `log2phy` and `logcnt`. Of a job's layout it also
holds `layers` [tables]: the layer of the model that each row is, and `ranks` [tables, devices]: the
rank that each device of a row is. Shares of tokens are left out: EPLB's are equal.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pacekeeper.cli.common.options import with_controller_options
from pacekeeper.cli.common.paths import PathType
from pacekeeper.core.config.client import ClientConfig
from pacekeeper.core.errors import ConfigError, DataError, HostError

if TYPE_CHECKING:
    from pacekeeper.controller.planning.eplb import Tables
    from pacekeeper.core.layout.layout import Layout

SUFFIXES = (".npz", ".json")


@click.command()
@with_controller_options
@click.argument("job")
@click.argument("file", type=PathType(dir_okay=False, path_type=Path))
@click.option(
    "--generation",
    type=click.IntRange(1, 2**32 - 1),
    help="Generation of the layout [default: the current one].",
)
def eplb(client: ClientConfig, job: str, file: Path, generation: int | None) -> None:
    """Write where a job's experts lie, in EPLB's form.

    FILE ends in .npz or .json. Ranks with fewer experts than others get further replicas in the
    tables, so that all have the same number of slots.
    """
    from pacekeeper.cli.common.client import call, status_stub
    from pacekeeper.core.layout.codec import decode_layout
    from pacekeeper.protos import status_pb2

    check_suffix(file)
    with status_stub(client) as stub:
        request = status_pb2.GetLayoutRequest(job=job, generation=generation or 0)
        layout = decode_layout(call(stub.GetLayout, request).layout_json)
    try:
        tables, layers, ranks = layout_tables(layout)
    except ValueError as error:
        raise DataError(f"job {job!r}: {error}") from None
    write_tables(file, tables, layers=layers, ranks=ranks)
    shown = (
        f"{len(layers)} layers, {len(ranks[0])} devices, {tables.phy2log.shape[1]} slots a layer"
    )
    click.echo(f"generation {layout.generation}: {shown}: {file}")


def layout_tables(layout: "Layout") -> "tuple[Tables, list[int], list[list[int]]]":
    """Return EPLB's tables of a layout.

    Returns:
        The tables; the layers with experts; the ranks of each of them, [layers, devices].

    Raises:
        ValueError: the layers have different numbers of experts or ranks, or none has experts.
    """
    from pacekeeper.controller.planning.eplb import tables_of

    layers = [layer for layer, experts in enumerate(layout.experts) if experts]
    ranks = [list(layout.ranks_of_layer(layer)) for layer in layers]
    sizes = {(len(layout.experts[layer]), len(on)) for layer, on in zip(layers, ranks, strict=True)}
    if len(sizes) != 1:
        raise ValueError(
            "EPLB's tables need the same number of experts and ranks in every layer with experts; "
            f"here are {sorted(sizes)}"
        )
    replicas = [
        [[on.index(one.rank) for one in expert] for expert in layout.experts[layer]]
        for layer, on in zip(layers, ranks, strict=True)
    ]
    num_devices = len(ranks[0])
    held = [[0] * num_devices for _ in layers]
    for at, layer in enumerate(replicas):
        for device in (device for on in layer for device in on):
            held[at][device] += 1
    return tables_of(replicas, num_devices, max(map(max, held))), layers, ranks


def check_suffix(file: Path) -> None:
    """Raises ConfigError unless tables can be written to a file of this name."""
    if file.suffix not in SUFFIXES:
        raise ConfigError(f"{file}: expected a name that ends in {' or '.join(SUFFIXES)}")


def write_tables(file: Path, tables: "Tables", **more: list[int] | list[list[int]]) -> None:
    """Write tables and the arrays `more` to a file. Raises HostError if it cannot be written."""
    import numpy as np

    try:
        if file.suffix == ".npz":
            whole: dict[str, Any] = tables._asdict() | {k: np.array(v) for k, v in more.items()}
            with file.open("wb") as out:
                np.savez(out, **whole)
        else:
            plain = {name: table.tolist() for name, table in tables._asdict().items()} | more
            file.write_text(json.dumps(plain))
    except OSError as error:
        raise HostError(f"cannot write {file}: {error.strerror or error}") from None
