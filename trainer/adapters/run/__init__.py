"""`pacekeeper run`: runs a training script that knows nothing of pacekeeper and attaches to it.

`command` rewrites a launcher's command so that each rank runs `python -m` this package with the
script's own arguments; `automatic` attaches when the first optimizer has stepped.
"""
