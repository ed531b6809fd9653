"""One command, `pacekeeper`."""
