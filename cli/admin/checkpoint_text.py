"""Output of `pacekeeper checkpoint`: tables and JSON documents."""

import sys
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from pacekeeper.core.checkpoint.interval import SaveCosts
from pacekeeper.core.checkpoint.manifest import Manifest, PieceEntry, block_name, checkpoint_of_file
from pacekeeper.core.layout.codec import encode_layout

FILE_WIDTH = 160  # columns if the output is not a terminal
_STYLES = {
    "damaged": "bold red", "unreadable": "bold red", "rejected": "red", "incomplete": "yellow",
    "referenced": "dim", "removed": "dim",
}  # fmt: skip


def as_document(manifest: Manifest, root: str) -> dict[str, Any]:
    """Return a manifest as JSON values."""
    import json

    return {
        "path": f"{root}/{manifest.id.name}",
        "job": manifest.job,
        "run_id": manifest.id.run_id,
        "generation": manifest.id.generation,
        "step": manifest.id.step,
        "ticket": manifest.ticket,
        "num_updates": manifest.num_updates,
        "last_loss": manifest.last_loss,
        "identity": dict(manifest.identity),
        "layout": json.loads(encode_layout(manifest.layout)),
        "own_bytes": manifest.own_bytes,
        "steps_again": manifest.steps_again,
        "costs": None if manifest.costs is None else cost_document(manifest.costs),
        "lost_tokens": list(manifest.lost_tokens),
        "lost_before_tokens": list(manifest.account.lost),
        "num_faults": manifest.account.num_faults,
        "files": [{"name": file.name, "size_bytes": file.size_bytes} for file in manifest.files],
        "pieces": [
            {
                "name": block_name(entry.piece.block),
                "kind": str(entry.piece.block.kind),
                "moments": entry.piece.kind,
                "step": _step_of(entry),
                "file": entry.file,
                "first_byte": entry.first_byte,
                "size_bytes": entry.size_bytes,
                "sha256": entry.sha256,
            }
            for entry in manifest.entries
        ],
    }


def cost_document(costs: SaveCosts) -> dict[str, Any]:
    """Return the measured cost of saving, with the best period, as JSON values."""
    return asdict(costs) | {"best_period_steps": costs.best_period_steps, "text": costs.text()}


def _step_of(entry: PieceEntry) -> int | None:
    """Return the step of a piece: the number of steps committed when it was saved."""
    of = checkpoint_of_file(entry.file)
    return of.step if entry.step is None and of is not None else entry.step


def print_checkpoints(rows: list[dict[str, Any]]) -> None:
    """Print the table of checkpoints, with remarks and damage below."""
    from rich.table import Table

    table = Table(box=None, header_style="dim")
    for name in ("step", "generation", "launched (UTC)", "blocks", "MB", "state"):
        table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
    table.add_column("path", overflow="fold")
    for row in rows:
        size = row["own_bytes"]
        table.add_row(
            str(row["step"]),
            str(row["generation"]),
            _launch_time(row["run_id"]),
            "" if row["num_blocks"] is None else str(row["num_blocks"]),
            "" if size is None else f"{size / 1e6:,.1f}",
            row["state"],
            _text(row["path"]),
            style=_STYLES.get(row["state"], ""),
        )
    console = _console()
    console.print(table)
    for row in rows:
        if row["oldest_step"] not in (None, row["step"]):
            console.print(
                f"[yellow]partial:[/] step {row['step']} uses {row['size_bytes'] / 1e6:,.1f} MB "
                f"of files from step {row['oldest_step']} on; restoring it loses "
                f"{row['lost_tokens']:,} tokens of its experts"
            )
        if row["steps_again"]:
            console.print(
                f"[cyan]window:[/] step {row['step']} is spread over {row['steps_again'] + 1} "
                f"steps; restoring it recomputes {row['steps_again']} and is exact"
            )
        for line in row["damages"]:
            console.print(f"[bold red]{row['state']}:[/] {_text(line)}")


def print_checkpoint(document: dict[str, Any]) -> None:
    """Print one checkpoint: job, layout, identity, costs, blocks and files."""
    from rich.table import Table

    console = _console()
    loss = "none yet" if document["last_loss"] is None else f"{document['last_loss']:.4f}"
    console.print(
        f"[bold]{_text(document['job'])}[/]  step {document['step']}  loss {loss}  "
        f"generation {document['generation']}  launched {_launch_time(document['run_id'])} UTC"
    )
    console.print(_text(document["path"]), style="dim")
    # The first rank of the first stage of each pipeline.
    ranks = [stages[0][2][0] for _, stages in document["layout"]["pipelines"]]
    own = document["path"].rpartition("/")[2] + "/"
    console.print(
        f"saved by ranks {_text(str(ranks))} in "
        f"{sum(file['name'].startswith(own) for file in document['files'])} files"
    )
    console.print(_text(", ".join(f"{k} {value}" for k, value in document["identity"].items())))
    again = document["steps_again"]
    older = [p for p in document["pieces"] if p["step"] != document["step"]]
    if again:
        console.print(
            f"[cyan]window:[/] steps {document['step'] - again} to {document['step']}; restoring "
            f"it recomputes {again} steps and is exact"
        )
    elif older:
        console.print(
            f"[yellow]partial:[/] {len({p['name'] for p in older})} blocks are from earlier steps, "
            f"down to {min(p['step'] for p in older)}; restoring it loses "
            f"{sum(document['lost_tokens']):,} tokens of their experts"
        )
    if document["costs"] is not None:
        console.print(f"costs: {document['costs']['text']}")
    blocks: dict[str, set[str]] = {}
    size: dict[str, int] = {}
    for piece in document["pieces"]:
        kind = piece["kind"]
        blocks.setdefault(kind, set()).add(piece["name"])
        size[kind] = size.get(kind, 0) + piece["size_bytes"]
    table = Table(box=None, header_style="dim")
    for name in ("blocks", "number", "MB"):
        table.add_column(name, justify="left" if name == "blocks" else "right")
    for kind, names in blocks.items():
        table.add_row(kind.replace("_", " "), str(len(names)), f"{size[kind] / 1e6:,.2f}")
    console.print(table)
    files = Table(box=None, header_style="dim")
    files.add_column("file")
    files.add_column("MB", justify="right")
    for file in document["files"]:
        files.add_row(_text(file["name"].removeprefix(own)), f"{file['size_bytes'] / 1e6:,.2f}")
    console.print(files)


def _console() -> Any:
    """Return a console as wide as the terminal, or FILE_WIDTH columns."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else FILE_WIDTH
    return Console(width=width, highlight=False, soft_wrap=True)


def _launch_time(run_id: int) -> str:
    """Format the launch time in Unix milliseconds; "?" for directories that no launch made."""
    try:
        return datetime.fromtimestamp(run_id / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "?"


def printable(found: object) -> str:
    """Escape unprintable characters: file names must not send control codes to a terminal."""
    kept = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(found))
    return "".join(kept)


def _text(found: object) -> str:
    from rich.markup import escape

    return escape(printable(found))
