"""Gradients added up over ranks, in buckets, while the backward pass goes on: `Gradients`.

Of dense blocks (`dense`), with or without owners of their optimizer state, and of expert replicas.
"""
