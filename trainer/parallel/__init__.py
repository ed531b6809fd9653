"""Parallel parts of the engine: experts and their replicas, gradients, optimizers, moves."""
