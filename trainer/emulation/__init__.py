"""Emulated accelerator and network: arithmetic is real, time is modelled. Used on request only."""
