"""The names of pacekeeper.trainer are loaded when they are used: the hooks need no package."""

import subprocess
import sys

import pytest

from pacekeeper import trainer


def test_the_import_alone_loads_no_package() -> None:
    code = (
        "import sys; before = set(sys.modules); import pacekeeper.trainer, "
        "pacekeeper.trainer.hooks.hooks; print(*set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-Ic", code], capture_output=True, text=True, check=True)
    tops = {name.partition(".")[0] for name in done.stdout.split()}
    assert tops - {"pacekeeper"} <= set(sys.stdlib_module_names)


def test_every_name_is_there() -> None:
    pytest.importorskip("transformers")
    assert all(getattr(trainer, name).__name__ == name for name in trainer.__all__)
    with pytest.raises(AttributeError):
        trainer.Nothing  # noqa: B018
