"""The training loop of pacekeeper's own trainer: settings, worker, steps, plans."""
