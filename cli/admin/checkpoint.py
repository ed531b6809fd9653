"""`pacekeeper checkpoint`: what lies in a directory, whether it is whole, what may go. No torch."""

import json
from typing import Any

import click


@click.group()
def command() -> None:
    """List, check, show and clear checkpoints.

    PATH is a checkpoint, the directory of a job's checkpoints, or the one above (--checkpoint-dir).
    """


@command.command()
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def ls(path: str, as_json: bool) -> None:
    """Which checkpoints there are, newest first. Reads manifests only.

    MB are those written for it. Of a partial one, which lives from files of others too, it is said
    how far back, and how many tokens going back to it would lose; of a window, how many steps going
    back does again.
    """
    _print(_rows(_find(path), is_read=False), as_json)


@command.command()
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_context
def verify(ctx: click.Context, path: str, as_json: bool) -> None:
    """Read every byte and say what is damaged; ends with code 9 where something is.

    One that was broken off while it was written is no damage: it never counted. Nor is one that its
    job removes meanwhile: it is gone.
    """
    from pacekeeper.core.errors import ExitCode

    found = _find(path)
    rows = _rows(found, is_read=True)
    _print(rows, as_json)
    is_named = found[0][1].name == _root(path).rpartition("/")[2]
    bad = ("damaged", "unreadable")
    if any(row["state"] in bad or (is_named and row["state"] != "whole") for row in rows):
        ctx.exit(int(ExitCode.DATA))


@command.command()
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def show(path: str, as_json: bool) -> None:
    """What one checkpoint holds (of a directory: its newest complete one)."""
    from pacekeeper.cli.admin import checkpoint_text
    from pacekeeper.core.errors import DataError
    from pacekeeper.trainer.checkpoint.reader import complete_ids, read_manifest

    found = _find(path)
    complete = found
    if len(found) > 1:
        storages = {id(storage): storage for storage, _ in found}.values()
        complete = [(storage, one) for storage in storages for one in complete_ids(storage)]
    if not complete:
        raise DataError(f"{path}: no complete checkpoint")
    storage, one = max(complete, key=lambda pair: pair[1])
    document = checkpoint_text.as_document(read_manifest(storage, one), storage.root)
    if as_json:
        click.echo(json.dumps(document))
    else:
        checkpoint_text.show(document)


@command.command()
@click.argument("path")
@click.option("--keep", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--dry-run", is_flag=True, help="Say what would go; delete nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def gc(path: str, keep: int, dry_run: bool, as_json: bool) -> None:
    """Delete what the newest complete checkpoints make useless; PATH is a job's directory.

    The newest --keep that no job failed to read stay, with every file they live from; where the
    newest is partial, two more, so that a file that breaks does not take all. What is newer than
    the newest complete one may be being written now, and is left alone.
    """
    from pacekeeper.cli.admin import checkpoint_text
    from pacekeeper.core.checkpoint.manifest import MANIFEST_FILE
    from pacekeeper.core.errors import DataError, HostError
    from pacekeeper.trainer.checkpoint.reader import complete_ids
    from pacekeeper.trainer.checkpoint.retention import removable, sweep
    from pacekeeper.trainer.checkpoint.storage import open_storage

    storage = open_storage(_root(path))
    try:
        newest = next(iter(complete_ids(storage)), None)
        if newest is None:
            jobs = sorted({of.root for of, _ in _find(path)} - {storage.root})
            raise DataError(
                f"{path}: no complete checkpoint there: nothing is known to be useless",
                remedy=f"name the directory of a job, such as {jobs[0]!a}" if jobs else "",
            )
        found = removable(storage, newest, keep)
        if not dry_run:
            sweep(storage, newest, keep)
    except OSError as error:
        raise HostError(
            f"{path}: {error.strerror or error}", remedy="may this user delete there?"
        ) from None
    whole = [one.name for one in found.whole]
    ended = [f"{one.name}/{MANIFEST_FILE}" for one in found.manifests if one not in found.whole]
    files = [*ended, *found.files]  # it is a checkpoint no more, though others live from it
    if as_json:
        click.echo(json.dumps({"removed": whole, "files": files, "dry_run": dry_run}))
        return
    word = "would go" if dry_run else "gone"
    for name in (*whole, *files):
        click.echo(f"{word}: {checkpoint_text.plain(name)}")
    if not whole and not files:
        click.echo("nothing is useless")


def _find(path: str) -> list[tuple[Any, Any]]:
    """(storage, id) of each checkpoint, by job, newest first. Raises DataError: there is none."""
    from pacekeeper.core.checkpoint.manifest import CheckpointId
    from pacekeeper.core.errors import DataError
    from pacekeeper.trainer.checkpoint.reader import ids
    from pacekeeper.trainer.checkpoint.storage import below, open_storage

    path = _root(path)
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
                found += _of_job(open_storage(below(path, job)))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    if not found:
        raise DataError(f"{path}: no checkpoint there", remedy="name what --checkpoint-dir named")
    return found


def _of_job(storage: Any) -> list[tuple[Any, Any]]:
    """Those in a directory beside others, of which one may be closed to us (lost+found)."""
    from pacekeeper.trainer.checkpoint.reader import ids, why_of

    try:
        return [(storage, one) for one in ids(storage)]
    except PermissionError as error:
        click.echo(f"not looked into: {storage.root!a}: {why_of(error)}", err=True)
        return []


def _root(path: str) -> str:
    """Without slashes at its end, unless it is nothing else. Raises DataError: it is empty."""
    from pacekeeper.core.errors import DataError

    if not path:
        raise DataError("no path was named", remedy="name what --checkpoint-dir named")
    root = path.rstrip("/")
    return path if path.endswith("://") or not root else root


def _rows(found: list[tuple[Any, Any]], *, is_read: bool) -> list[dict[str, Any]]:
    """A row for each checkpoint; `is_read`: every byte."""
    from pacekeeper.trainer.checkpoint.reader import why_of
    from pacekeeper.trainer.checkpoint.retention import lent_out

    lent: dict[int, dict[Any, int]] = {}  # by storage: reading all its manifests takes a while
    rows = []
    for storage, one in found:
        row = _blank(storage, one)
        try:
            row = _row(row, storage, one, is_read=is_read)
            if row["state"] == "damaged" and not _counts(storage, one):
                row = _blank(storage, one) | {"state": "gone"}
            if row["state"] in ("broken off", "gone"):
                if id(storage) not in lent:
                    lent[id(storage)] = lent_out(storage)
                row["state"] = "lent" if one in lent[id(storage)] else row["state"]
        except OSError as error:
            row |= {"state": "unreadable", "damages": [f"{row['path']}: {why_of(error)}"]}
        rows.append(row)
    return rows


def _counts(storage: Any, one: Any) -> bool:
    """Is its manifest still there? It goes first where its job keeps newer ones."""
    from pacekeeper.core.checkpoint.manifest import MANIFEST_FILE

    return MANIFEST_FILE in storage.names(one.name)


def _blank(storage: Any, one: Any) -> dict[str, Any]:
    """What its place says of a checkpoint."""
    from pacekeeper.trainer.checkpoint.storage import below

    return {
        "path": below(storage.root, one.name),
        "step": one.step,
        "generation": one.generation,
        "life": one.life,
        "state": "broken off",
        "num_blocks": None,
        "size_bytes": None,
        "own_bytes": None,
        "oldest_step": None,
        "steps_again": None,
        "lost_tokens": None,
        "damages": [],
    }


def _row(row: dict[str, Any], storage: Any, one: Any, *, is_read: bool) -> dict[str, Any]:
    """One checkpoint for a table. Its state: complete or, if all was read, whole; broken off;
    damaged; rejected by a job that could not read it; unreadable: storage refuses. What comes from
    other checkpoints, or from a second look, is the caller's: lent (only files are left that others
    live from), gone (while it was read). Raises OSError where storage refuses.
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
    named = list(damages(storage, manifest)) if is_read else []
    told = "rejected" if REJECTED_FILE in names else "complete"
    whole = "whole" if is_read else told
    return row | {"state": "damaged" if named else whole, "damages": named}


def _print(rows: list[dict[str, Any]], as_json: bool) -> None:
    from pacekeeper.cli.admin import checkpoint_text

    if as_json:
        click.echo(json.dumps({"checkpoints": rows}))
    else:
        checkpoint_text.show_rows(rows)
