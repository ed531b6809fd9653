"""Adapters that attach other trainers: PyTorch, Hugging Face, Lightning and others.

Each imports its trainer only when used, reports steps and micro-batches through `trainer.hooks`,
and never raises into training.
"""
