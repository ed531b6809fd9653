"""Trainer of one small byte-level model, which the engine for Hugging Face models replaces."""
