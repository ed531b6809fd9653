"""Tensor groups and pipeline stages of a layout: their ranks, slices of tokens, and messages.

`subgroup` has collectives of some ranks; `token_slices` cuts the tokens of a micro-batch among the
ranks of a tensor group and between stages; `tensor_regions` computes attention and dense MLPs of
the whole micro-batch on slices of it; `stage_run` runs a stage's program.
"""
