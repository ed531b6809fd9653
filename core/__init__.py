"""The shared vocabulary of all parts: values only, standard library only."""
