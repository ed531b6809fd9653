"""Runs a script as `python` would, and attaches to what it trains: `python -m ... SCRIPT ARGS`.

`-m MODULE ARGS` runs a module. The script sees its own sys.argv, sys.path[0] and `__main__`; torch
is not imported unless the script imports it.
"""

import os
import runpy
import sys

from pacekeeper.trainer.adapters.run.automatic import attach_after_import


def main() -> None:
    """Run the script of this process's arguments; its exit code and exceptions are its own."""
    words = sys.argv[1:]
    if not words or (words[0] == "-m" and len(words) < 2):
        sys.exit("usage: python -m pacekeeper.trainer.adapters.run [-m] SCRIPT [ARGUMENTS]")
    attach_after_import()
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = words
    if not sys.flags.safe_path:  # with -P or -I there is no folder of the script on the path
        sys.path[0] = os.path.dirname(os.path.realpath(words[0]))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
