"""Hooks and adapters for any trainer, and pacekeeper's own mixture-of-experts trainer.

`hooks` and `adapters` report a training loop to the node's agent. Of the own trainer, `engine`
runs the loop, `model` holds the network, `parallel` spreads it over ranks, `distributed` wraps
process groups and stores, `elastic` survives and joins ranks, `checkpoint` saves and restores,
`emulation` emulates an accelerator.
"""
