"""What the tests' fork server runs as its main module: what each forked process would do again."""

import gc
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.fork_server import LOADED

for name in LOADED:
    importlib.import_module(name)
# A collection in a forked process copies no page of what is loaded here.
gc.collect()
gc.freeze()
