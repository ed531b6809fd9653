"""Training scripts that know nothing of pacekeeper: tests run them by `pacekeeper run`."""
