"""`pacekeeper data`: make token files of text, and check token files."""

import os
import signal
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pacekeeper.cli.common.options import option_group
from pacekeeper.cli.common.paths import PathType
from pacekeeper.cli.data.progress import Progress, format_mb
from pacekeeper.core.text import format_s

if TYPE_CHECKING:
    from pacekeeper.trainer.data.token_file import TokenDtype
    from pacekeeper.trainer.data.tokenizing.tokenize import TokenizeOptions

DTYPES = click.Choice(["uint16", "uint32"])


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingOptions:
    """How text is encoded, as given on the command line."""

    tokenizer: str
    end_of_document: str | None
    dtype: "TokenDtype | None"
    num_processes: int | None
    overwrite: bool

    def with_defaults(self) -> "TokenizeOptions":
        """Return the options with the number of processes for this machine."""
        from pacekeeper.trainer.data.tokenizing.encoders import BYTES, EncoderSpec
        from pacekeeper.trainer.data.tokenizing.tokenize import TokenizeOptions

        num_cores = 1 if self.tokenizer == BYTES else len(os.sched_getaffinity(0))
        return TokenizeOptions(
            encoder=EncoderSpec(self.tokenizer, self.end_of_document),
            dtype=self.dtype,
            num_processes=self.num_processes or num_cores,
            overwrite=self.overwrite,
        )


@click.group()
def command() -> None:
    """Make token files of text for `pacekeeper launch`, and check token files."""


@command.command("tokenize")
@click.argument(
    "inputs",
    nargs=-1,
    required=True,
    type=PathType(exists=True, path_type=Path),
)
@click.option(
    "--out",
    "output",
    required=True,
    metavar="FILE.bin",
    type=PathType(dir_okay=False, path_type=Path),
    help="Token file to write; FILE.bin.json describes it.",
)
@option_group(
    "encoding",
    EncodingOptions,
    click.option(
        "--tokenizer",
        required=True,
        metavar="FOLDER|FILE|bytes",
        help="Folder with tokenizer.json, or such a file; bytes: one token per byte.",
    ),
    click.option(
        "--end-of-document",
        metavar="TOKEN",
        help="Special token after each document [default: eos_token of the tokenizer].",
    ),
    click.option(
        "--dtype",
        type=DTYPES,
        help="Type of the tokens [default: the smallest that has room for the vocabulary].",
    ),
    click.option(
        "--processes",
        "num_processes",
        type=click.IntRange(1, 1024),
        help="Processes that encode [default: one per core; 1 for bytes].",
    ),
    click.option("--overwrite", is_flag=True, help="Replace FILE.bin if it exists."),
)
@click.option(
    "--field",
    default="text",
    show_default=True,
    help="Key or column of the text in JSON lines and datasets.",
)
@click.option(
    "--separator",
    metavar="LINE",
    help="Line between documents of a text file, '' for a blank line [default: a file is one "
    "document].",
)
def tokenize_command(
    inputs: tuple[Path, ...],
    output: Path,
    encoding: EncodingOptions,
    field: str,
    separator: str | None,
) -> None:
    """Make a token file of INPUTS, in the given order.

    An input is a text file; JSON lines (.jsonl, .ndjson or .json), a document per line; one of
    these packed (.gz); or the folder of a dataset that was saved with `save_to_disk`.

    The same inputs give the same file, whatever the number of processes. The file appears when it
    is complete.
    """
    from pacekeeper.trainer.data.tokenizing.inputs import find_inputs
    from pacekeeper.trainer.data.tokenizing.tokenize import tokenize

    found = find_inputs(inputs, field=field, separator=separator)
    size_bytes = sum(one.size_bytes for one in found)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # cleans up, as Ctrl-C
    with closing(Progress(size_bytes)) as progress:
        info = tokenize(found, output, encoding.with_defaults(), progress.update)
        elapsed_s = progress.elapsed_s
    click.echo(
        f"{output}: {info.num_tokens:,} tokens ({info.dtype}) of {info.num_documents:,} documents, "
        f"vocabulary {info.vocab_size:,}, from {format_mb(size_bytes)} in {format_s(elapsed_s)} "
        f"({format_mb(size_bytes / elapsed_s)}/s)"
    )


@command.command("check")
@click.argument("files", nargs=-1, required=True, type=PathType(path_type=Path))
@click.option("--dtype", type=DTYPES, help="Type of tokens without description.")
def check_command(files: tuple[Path, ...], dtype: "TokenDtype | None") -> None:
    """Read token FILES as a whole and check them.

    Sizes, checksums and vocabulary must fit the description or the index.

    A file is FILE.bin with FILE.bin.json, FILE.bin with FILE.idx of Megatron-LM, or FILE.bin alone
    with --dtype.
    """
    from pacekeeper.trainer.data.token_stream import open_tokens

    for file in files:
        (shard,) = open_tokens([file], dtype=dtype).shards
        shard.verify()
        checked = "sizes are correct" if shard.crc32 is None else "the checksum is correct"
        click.echo(f"{shard.path}: {len(shard.tokens):,} tokens ({shard.tokens.dtype}), {checked}")
