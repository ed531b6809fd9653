"""`pacekeeper checkpoint`: list, verify, show, export and delete checkpoints.

Only export needs torch.

States of a checkpoint: complete; verified (complete, every byte read); incomplete (never finished);
damaged; rejected (a job could not read it); unreadable (the storage refuses); referenced (only
files that other checkpoints use are left); removed (by its job while it was read).
"""

import json
from typing import Any

import click

from pacekeeper.cli.common.options import json_option


@click.group()
def command() -> None:
    """List, verify, show, export and delete checkpoints.

    PATH is a checkpoint, a job's checkpoint directory, or its parent (--checkpoint-dir).
    """


@command.command()
@click.argument("path")
@json_option()
def ls(path: str, as_json: bool) -> None:
    """List checkpoints, newest first; reads manifests only.

    MB counts the bytes written for the checkpoint. Below the table: for partial checkpoints, which
    reuse older files, their oldest step and the tokens lost by a restore; for checkpoints spread
    over several steps, the steps that a restore recomputes.
    """
    _print_rows(_rows(_find_checkpoints(path), is_read=False), as_json)


@command.command()
@click.argument("path")
@json_option()
@click.pass_context
def verify(ctx: click.Context, path: str, as_json: bool) -> None:
    """Read every byte and report damage; exit code 9 if any.

    Incomplete checkpoints, and checkpoints that their job removes meanwhile, are not damage unless
    PATH names them.
    """
    from pacekeeper.core.errors import ExitCode

    found = _find_checkpoints(path)
    rows = _rows(found, is_read=True)
    _print_rows(rows, as_json)
    is_single = found[0][1].name == _normalized_path(path).rpartition("/")[2]
    bad = ("damaged", "unreadable")
    if any(row["state"] in bad or (is_single and row["state"] != "verified") for row in rows):
        ctx.exit(int(ExitCode.DATA))


@command.command()
@click.argument("path")
@json_option()
def show(path: str, as_json: bool) -> None:
    """Show one checkpoint; for a directory, its newest complete one."""
    from pacekeeper.cli.admin import checkpoint_text
    from pacekeeper.trainer.checkpoint.reader import read_manifest

    storage, one = _newest_complete(path)
    document = checkpoint_text.as_document(read_manifest(storage, one), storage.root)
    if as_json:
        click.echo(json.dumps(document))
    else:
        checkpoint_text.print_checkpoint(document)


@command.command()
@click.argument("path")
@click.argument("model")
@click.argument("out")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Type of the tensors on disk [default: as saved].",
)
def export(path: str, model: str, out: str, dtype: str | None) -> None:
    """Export the weights as a Hugging Face checkpoint.

    PATH is a checkpoint, or a directory whose newest one is taken; MODEL is the folder with the
    model's config.json; OUT is a new folder. The job may train on meanwhile.
    """
    from pathlib import Path

    from pacekeeper.cli.common.extras import require

    require("trainer")
    import torch

    from pacekeeper.trainer.engine.export import export_saved

    storage, one = _newest_complete(path)
    kind = None if dtype is None else getattr(torch, dtype)
    saved = export_saved(storage, one, model, Path(out), kind)
    click.echo(f"exported step {saved.id.step} to {out}")
    if saved.older:
        click.echo("some experts are of earlier steps: the checkpoint is partial")


@command.command()
@click.argument("path")
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Number of complete checkpoints to keep.",
)
@click.option("--dry-run", is_flag=True, help="List what would be deleted; delete nothing.")
@json_option()
def gc(path: str, keep: int, dry_run: bool, as_json: bool) -> None:
    """Delete old checkpoints; PATH is a job's checkpoint directory.

    Keeps the newest --keep checkpoints that no job rejected, with every file that they use, and
    two more if the newest is partial. Checkpoints newer than the newest complete one are kept:
    they may be being written.
    """
    from pacekeeper.cli.admin import checkpoint_text
    from pacekeeper.core.checkpoint.manifest import MANIFEST_FILE
    from pacekeeper.core.errors import DataError, HostError
    from pacekeeper.trainer.checkpoint.reader import complete_ids
    from pacekeeper.trainer.checkpoint.retention import removable, sweep
    from pacekeeper.trainer.checkpoint.storage import open_storage

    storage = open_storage(_normalized_path(path))
    try:
        newest = next(iter(complete_ids(storage)), None)
        if newest is None:
            jobs = sorted({of.root for of, _ in _find_checkpoints(path)} - {storage.root})
            raise DataError(
                f"{path}: no complete checkpoint, so nothing can be deleted safely",
                remedy=f"give the directory of a job, such as {jobs[0]!a}" if jobs else "",
            )
        found = removable(storage, newest, keep)
        if not dry_run:
            sweep(storage, newest, keep)
    except OSError as error:
        raise HostError(
            f"{path}: {error.strerror or error}", remedy="check that this user can delete there"
        ) from None
    whole = [one.name for one in found.whole]
    ended = [f"{one.name}/{MANIFEST_FILE}" for one in found.manifests if one not in found.whole]
    files = [*ended, *found.files]  # its files stay if others use them
    if as_json:
        click.echo(json.dumps({"removed": whole, "files": files, "dry_run": dry_run}))
        return
    word = "would delete" if dry_run else "deleted"
    for name in (*whole, *files):
        click.echo(f"{word}: {checkpoint_text.printable(name)}")
    if not whole and not files:
        click.echo("nothing to delete")


def _find_checkpoints(path: str) -> list[tuple[Any, Any]]:
    """Return (storage, id) of each checkpoint, by job, newest first.

    Raises:
        DataError: there is none.
    """
    from pacekeeper.core.checkpoint.manifest import CheckpointId
    from pacekeeper.core.errors import DataError
    from pacekeeper.trainer.checkpoint.reader import ids
    from pacekeeper.trainer.checkpoint.storage import below, open_storage

    path = _normalized_path(path)
    root, slash, name = path.rpartition("/")
    named = CheckpointId.of_name(name)
    try:
        if named is not None:
            storage = open_storage(root or slash or ".")
            found = [(storage, one) for one in ids(storage) if one == named]
        else:
            top = open_storage(path)
            found = [(top, one) for one in ids(top)]
            for job in top.names("") if not found else ():
                found += _checkpoints_of_job(open_storage(below(path, job)))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    if not found:
        raise DataError(
            f"{path}: no checkpoints", remedy="give the directory of `launch --checkpoint-dir`"
        )
    return found


def _newest_complete(path: str) -> tuple[Any, Any]:
    """Return (storage, id) of a checkpoint, or of the newest complete one below a directory.

    Raises:
        DataError: there is none.
    """
    from pacekeeper.core.errors import DataError
    from pacekeeper.trainer.checkpoint.reader import complete_ids

    complete = found = _find_checkpoints(path)
    if len(found) > 1:
        storages = {id(storage): storage for storage, _ in found}.values()
        complete = [(storage, one) for storage in storages for one in complete_ids(storage)]
    if not complete:
        raise DataError(f"{path}: no complete checkpoint")
    newest: tuple[Any, Any] = max(complete, key=lambda pair: pair[1])
    return newest


def _checkpoints_of_job(storage: Any) -> list[tuple[Any, Any]]:
    """Return the checkpoints of one directory; warn if it is not readable, like lost+found."""
    from pacekeeper.trainer.checkpoint.reader import ids, why_of

    try:
        return [(storage, one) for one in ids(storage)]
    except PermissionError as error:
        click.echo(f"skipped {storage.root!a}: {why_of(error)}", err=True)
        return []


def _normalized_path(path: str) -> str:
    """Remove trailing slashes, except from a root. Raises DataError if the path is empty."""
    from pacekeeper.core.errors import DataError

    if not path:
        raise DataError(
            "the path is empty", remedy="give the directory of `launch --checkpoint-dir`"
        )
    root = path.rstrip("/")
    return path if path.endswith("://") or not root else root


def _rows(found: list[tuple[Any, Any]], *, is_read: bool) -> list[dict[str, Any]]:
    """Return one row per checkpoint; with `is_read` every byte is checked."""
    from pacekeeper.trainer.checkpoint.reader import why_of
    from pacekeeper.trainer.checkpoint.retention import lent_out

    referenced: dict[int, dict[Any, int]] = {}  # by storage: reading all manifests is slow
    rows = []
    for storage, one in found:
        row = _incomplete_row(storage, one)
        try:
            row = _read_row(row, storage, one, is_read=is_read)
            if row["state"] == "damaged" and not _has_manifest(storage, one):
                row = _incomplete_row(storage, one) | {"state": "removed"}
            if row["state"] in ("incomplete", "removed"):
                if id(storage) not in referenced:
                    referenced[id(storage)] = lent_out(storage)
                if one in referenced[id(storage)]:
                    row["state"] = "referenced"
        except OSError as error:
            row |= {"state": "unreadable", "damages": [f"{row['path']}: {why_of(error)}"]}
        rows.append(row)
    return rows


def _has_manifest(storage: Any, one: Any) -> bool:
    """Return whether the manifest exists; a job deletes it before the other files."""
    from pacekeeper.core.checkpoint.manifest import MANIFEST_FILE

    return MANIFEST_FILE in storage.names(one.name)


def _incomplete_row(storage: Any, one: Any) -> dict[str, Any]:
    """Return the row of a checkpoint without manifest, from its path."""
    from pacekeeper.trainer.checkpoint.storage import below

    return {
        "path": below(storage.root, one.name),
        "step": one.step,
        "generation": one.generation,
        "run_id": one.run_id,
        "state": "incomplete",
        "num_blocks": None,
        "size_bytes": None,
        "own_bytes": None,
        "oldest_step": None,
        "steps_again": None,
        "lost_tokens": None,
        "damages": [],
    }


def _read_row(row: dict[str, Any], storage: Any, one: Any, *, is_read: bool) -> dict[str, Any]:
    """Complete a row from the manifest and, with `is_read`, from every byte.

    The states referenced, removed and unreadable are set by the caller.

    Raises:
        OSError: the storage refuses.
    """
    from pacekeeper.core.checkpoint.manifest import MANIFEST_FILE, checkpoint_of_file
    from pacekeeper.core.errors import DataError
    from pacekeeper.trainer.checkpoint.reader import REJECTED_FILE, damages, read_manifest

    names = storage.names(one.name)
    if MANIFEST_FILE not in names:
        return row
    try:
        manifest = read_manifest(storage, one)
    except DataError as error:
        return row | {"state": "damaged", "damages": [error.what]}
    steps = [of.step for entry in manifest.pieces if (of := checkpoint_of_file(entry.file))]
    row |= {
        "num_blocks": len({entry.piece.block for entry in manifest.pieces}),
        "size_bytes": manifest.size_bytes,
        "own_bytes": manifest.own_bytes,
        "oldest_step": min(steps),
        "steps_again": manifest.steps_again,
        "lost_tokens": sum(manifest.lost_tokens),
    }
    found = list(damages(storage, manifest)) if is_read else []
    listed = "rejected" if REJECTED_FILE in names else "complete"
    state = "verified" if is_read else listed
    return row | {"state": "damaged" if found else state, "damages": found}


def _print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    from pacekeeper.cli.admin import checkpoint_text

    if as_json:
        click.echo(json.dumps({"checkpoints": rows}))
    else:
        checkpoint_text.print_checkpoints(rows)
