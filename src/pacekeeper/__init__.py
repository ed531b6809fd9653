"""pacekeeper keeps mixture-of-experts training on pace: it finds slow GPUs and moves their work.

This file and `py.typed` are all that lies here; the links beside them lead to the sub-packages at
the top of the repository, for editable installs and static tools. A wheel holds the folders
themselves. Importing this package loads nothing but the version.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
