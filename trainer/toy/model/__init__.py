"""The mixture-of-experts transformer of pacekeeper's own trainer, its blocks and its data."""
