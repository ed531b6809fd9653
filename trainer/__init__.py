"""Hooks and adapters for any trainer, and pacekeeper's own mixture-of-experts trainer.

`hooks` and `adapters` report a training loop to the node's agent. `engine` trains models of
transformers: `model` holds their blocks, `parallel` spreads them over ranks, `groups` are its
collectives, `data` its batches. `toy` is the byte-level trainer that it replaces: `distributed`
wraps its process groups and stores, `elastic` survives and joins ranks, `checkpoint` saves and
restores, `emulation` emulates an accelerator.
"""
