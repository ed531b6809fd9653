"""Rewrites a command of torchrun, accelerate or python so that its script is run by our module.

The words before the launcher (`srun`, `env`, `numactl`) and its options are kept; where the script
stands among them is found by the launcher's own parser.
"""

import os
import re
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from pacekeeper.core.errors import ConfigError

JOB_VARIABLE = "PACEKEEPER_JOB"
RUNNER = "pacekeeper.trainer.adapters.run"
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_ACCELERATE = ("accelerate", "accelerate.commands.launch")
_WITH_VALUE = ("W", "X")  # options of python
_REMEDY = f"put `python -m {RUNNER}` in the place of python, before the script"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewrittenCommand:
    """A command whose ranks attach themselves, and the script or module that it trains by.

    `runs_here`: whether the script is a file that the command runs in this folder, on this node.
    """

    words: tuple[str, ...]
    script: str
    runs_here: bool = False


def rewrite(command: Sequence[str]) -> RewrittenCommand:
    """Return `command` with its script run by `RUNNER`.

    Raises:
        ConfigError: If no launcher is among its words, or it runs no script.
    """
    words = list(command)
    for start, word in enumerate(words):
        name = os.path.basename(word)
        if name == "torchrun":
            found = _by_parser(words, start + 1, _torchrun_parser())
        elif name == "accelerate" and words[start + 1 : start + 2] == ["launch"]:
            found = _by_parser(words, start + 2, _accelerate_parser())
        elif _PYTHON.fullmatch(name):
            found = _of_python(words, start + 1)
        else:
            continue
        return replace(found, runs_here=found.runs_here and start == 0)
    raise ConfigError(
        f"{' '.join(words)}: none of torchrun, accelerate launch and python is a word of it",
        remedy=f"begin with one of them; in a script of the shell, {_REMEDY}",
    )


def _of_python(words: list[str], at: int) -> RewrittenCommand:
    """Rewrite from the interpreter's first option at `at` on."""
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        option = words[at]
        cluster = "" if option.startswith("--") else option[1:]
        for i, letter in enumerate(cluster):
            rest = cluster[i + 1 :]
            if letter == "c":
                raise ConfigError(f"python {option}: runs no script", remedy=_REMEDY)
            if letter == "m":
                own = [f"-{cluster[:i]}"] if i else []
                module = [rest] if rest else words[at + 1 : at + 2]
                tail = words[at + 1 if rest else at + 2 :]
                return _of_module([*words[:at], *own], module, tail)
            if letter in _WITH_VALUE:
                at += not rest
                break
        at += 1 + (option == "--check-hash-based-pycs")
    return _run(words[:at], words[at : at + 1], words[at + 1 :], is_module=False, has_flag=False)


def _of_module(before: list[str], module: list[str], tail: list[str]) -> RewrittenCommand:
    """Rewrite `python -m`, possibly of a launcher."""
    if module and (module[0] in _TORCHRUN or module[0] in _ACCELERATE):
        of_torch = module[0] in _TORCHRUN
        whole = [*before, "-m", *module, *tail]
        parser = _torchrun_parser() if of_torch else _accelerate_parser()
        return _by_parser(whole, len(whole) - len(tail), parser)
    return _run(before, module, tail, is_module=True, has_flag=False)


def _by_parser(words: list[str], at: int, parser: ArgumentParser) -> RewrittenCommand:
    """Rewrite a launcher's command whose options begin at `at`."""
    parser.prog = " ".join(words[:at])
    options = parser.parse_args(words[at:])
    if options.no_python:
        raise ConfigError(f"{words[at - 1]} --no-python: runs no script", remedy=_REMEDY)
    tail = list(options.training_script_args)
    script = len(words) - len(tail) - 1
    before = words[:script]
    return _run(before, [words[script]], tail, is_module=options.module, has_flag=options.module)


def _run(
    before: list[str], script: list[str], tail: list[str], *, is_module: bool, has_flag: bool
) -> RewrittenCommand:
    if not script or script[0] == "-":
        raise ConfigError(f"{' '.join(before)}: names no script", remedy=_REMEDY)
    ours = [] if has_flag else ["-m"]
    theirs = ["-m"] if is_module else []
    return RewrittenCommand(
        words=(*before, *ours, RUNNER, *theirs, *script, *tail),
        script=script[0],
        runs_here=not is_module,
    )


def _torchrun_parser() -> ArgumentParser:
    parser: ArgumentParser = _launcher("torch.distributed.run").get_args_parser()
    return parser


def _accelerate_parser() -> ArgumentParser:
    parser: ArgumentParser = _launcher("accelerate.commands.launch").launch_command_parser()
    return parser


def _launcher(name: str) -> Any:
    """Import a launcher. Raises ConfigError if it is not installed beside pacekeeper."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        raise ConfigError(
            f"the command is one of {package}, which {sys.executable} cannot import: {error}",
            remedy=f"install pacekeeper in the environment of {package}, or {_REMEDY}",
        ) from None


def default_job() -> str:
    """Return the job's name from PACEKEEPER_JOB, else from the script of this process."""
    return os.environ.get(JOB_VARIABLE) or job_of_script(sys.argv[0] if sys.argv else "")


def job_of_script(path: str) -> str:
    """Return a job's name from the path of a script or the name of a module."""
    place = Path(path)
    name = place.parent.name if place.stem == "__main__" else place.name.removesuffix(".py")
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip(".")[:64] or "job"
