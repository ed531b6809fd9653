"""Spreads the model over ranks: experts, tensor shards, pipeline stages, gradient sums, moves."""
