"""Models of transformers as typed blocks: built on the meta device, filled block by block.

`library` is the one module of pacekeeper that imports transformers. `skeleton` builds a model on
meta and says which tensors make which block of a layout (`names`, and `families` where a family has
a rule of its own; `cuts` says how attention and dense MLPs are divided into virtual shards).
`blocks` holds a rank's layers, shards and experts; `initialization` and
`checkpoint_reader` fill them, `checkpoint_writer` exports them (`conversions` knows how checkpoints
name and cut tensors). `routers` and `packing` serve the engine's losses and rows of documents.

In: a configuration or a checkpoint's folder. Out: modules that compute, and blocks that move.
"""
