"""How `pacekeeper checkpoint` shows what it found: tables for people, plain values for programs."""

from collections import Counter
from datetime import UTC, datetime
from typing import Any

from pacekeeper.core.layout_codec import encode_layout
from pacekeeper.core.manifest import Manifest, block_name

_STYLES = {"damaged": "bold red", "rejected": "red", "broken off": "yellow"}


def as_document(manifest: Manifest, root: str) -> dict[str, Any]:
    """Plain values of all that a manifest says."""
    import json

    return {
        "path": f"{root}/{manifest.id.name}",
        "job": manifest.job,
        "life": manifest.id.life,
        "generation": manifest.id.generation,
        "step": manifest.id.step,
        "ticket": manifest.ticket,
        "num_updates": manifest.num_updates,
        "last_loss": manifest.last_loss,
        "identity": dict(manifest.identity),
        "layout": json.loads(encode_layout(manifest.layout)),
        "files": [{"name": file.name, "size_bytes": file.size_bytes} for file in manifest.files],
        "blocks": [
            {
                "name": block_name(entry.block),
                "kind": str(entry.block.kind),
                "file": entry.file,
                "first_byte": entry.first_byte,
                "size_bytes": entry.size_bytes,
                "sha256": entry.sha256,
            }
            for entry in manifest.blocks
        ],
    }


def show_rows(rows: list[dict[str, Any]]) -> None:
    """A table of checkpoints, and what is damaged below it."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, header_style="dim")
    for name in ("step", "generation", "launched (UTC)", "blocks", "MB", "state"):
        table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
    table.add_column("path", overflow="fold")
    for row in rows:
        size = row["size_bytes"]
        table.add_row(
            str(row["step"]),
            str(row["generation"]),
            _when(row["life"]),
            "" if row["num_blocks"] is None else str(row["num_blocks"]),
            "" if size is None else f"{size / 1e6:,.1f}",
            row["state"],
            escape(row["path"]),
            style=_STYLES.get(row["state"], ""),
        )
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    for row in rows:
        for line in row["damages"]:
            console.print(f"[bold red]damaged:[/] {escape(line)}")


def show(document: dict[str, Any]) -> None:
    """One checkpoint."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    loss = "none yet" if document["last_loss"] is None else f"{document['last_loss']:.4f}"
    console.print(
        f"[bold]{escape(document['job'])}[/]  step {document['step']}  loss {loss}  "
        f"generation {document['generation']}  launched {_when(document['life'])} UTC"
    )
    console.print(escape(document["path"]), style="dim")
    ranks = [rank for rank, _ in document["layout"]["batch_shares"]]
    console.print(f"saved by {len(document['files'])} of {len(ranks)} ranks: {escape(str(ranks))}")
    console.print(", ".join(f"{name} {value}" for name, value in document["identity"].items()))
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for block in document["blocks"]:
        count[block["kind"]] += 1
        size[block["kind"]] += block["size_bytes"]
    table = Table(box=None, header_style="dim")
    for name in ("blocks", "number", "MB"):
        table.add_column(name, justify="left" if name == "blocks" else "right")
    for kind in count:
        table.add_row(kind.replace("_", " "), str(count[kind]), f"{size[kind] / 1e6:,.2f}")
    console.print(table)
    files = Table(box=None, header_style="dim")
    files.add_column("file")
    files.add_column("MB", justify="right")
    for file in document["files"]:
        files.add_row(escape(file["name"]), f"{file['size_bytes'] / 1e6:,.2f}")
    console.print(files)


def _when(life: int) -> str:
    """`life`: Unix milliseconds."""
    return datetime.fromtimestamp(life / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
