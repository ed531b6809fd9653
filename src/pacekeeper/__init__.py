"""pacekeeper keeps mixture-of-experts training on pace: it finds slow GPUs and moves their work.

This file and `py.typed` are all that lies here; the links beside them lead to the sub-packages at
the top of the repository, for editable installs and static tools. A wheel holds the folders
themselves. Importing this package loads nothing but the version; `pacekeeper.attach(model,
optimizer)` loads the adapter of torch (`trainer/adapters/pytorch.py`).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pacekeeper.trainer.adapters.pytorch import attach

__all__ = ["__version__", "attach"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "attach":
        from pacekeeper.trainer.adapters.pytorch import attach

        return attach
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
