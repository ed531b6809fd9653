"""Contents and timing of checkpoints: manifests, write plans, windows, intervals.

In: layouts, sizes of blocks, measured costs. Out: the pieces each rank writes, the experts of a
partial checkpoint, the steps of a window, and manifests with their JSON form. Files are read and
written in `trainer/checkpoint`.
"""
