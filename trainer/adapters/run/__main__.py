"""Runs a script as `python` would, and attaches to what it trains: `python -m ... SCRIPT ARGS`.

`-m MODULE ARGS` runs a module. The script sees its own sys.argv, sys.path[0] and `__main__`; torch
is not imported unless the script imports it.
"""

import os
import runpy
import sys
from importlib.util import find_spec

from pacekeeper.trainer.adapters.run.automatic import attach_after_import


def main() -> None:
    """Run the script of this process's arguments; its exit code and exceptions are its own."""
    words = sys.argv[1:]
    if not words or (words[0] == "-m" and len(words) < 2):
        sys.exit("usage: python -m pacekeeper.trainer.adapters.run [-m] SCRIPT [ARGUMENTS]")
    attach_after_import()
    if words[0] == "-m":
        if _is_missing(words[1]):
            sys.exit(f"{sys.executable}: No module named {words[1]}")
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = words
    if not os.path.exists(words[0]):
        print(f"{sys.executable}: no such script: {os.path.abspath(words[0])}", file=sys.stderr)
        sys.exit(2)  # as python does
    if not sys.flags.safe_path:  # with -P or -I there is no folder of the script on the path
        sys.path[0] = os.path.dirname(os.path.realpath(words[0]))
    runpy.run_path(words[0], run_name="__main__")


def _is_missing(module: str) -> bool:
    try:
        return find_spec(module) is None
    except ModuleNotFoundError as error:  # of a package that it is in, or of what that imports
        return f"{module}.".startswith(f"{error.name}.")


if __name__ == "__main__":
    main()
