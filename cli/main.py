"""The console script `pacekeeper`, with the standard library alone until a command's packages load.

The base installation serves the training process and has no packages for commands. There the script
prints its version, and for everything else names the extra that the command needs.
"""

import sys
from collections.abc import Sequence

import pacekeeper
from pacekeeper.cli.common.extras import extra_of, missing_package


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code.

    Args:
        arguments: the words after `pacekeeper`; None: those of this process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--version"]:
        print(f"pacekeeper {pacekeeper.__version__}")
        return
    try:
        from pacekeeper.cli.common.lazy_group import command

        command(words, prog_name="pacekeeper")
    except ModuleNotFoundError as error:
        failure = missing_package(error, extra=extra_of(words))
        if failure is None:
            raise
        print(f"pacekeeper: {failure}", file=sys.stderr)
        sys.exit(int(failure.exit_code))


if __name__ == "__main__":
    main()
