"""Survives dead ranks and admits new ones: launcher, rendezvous, consensus, two-phase commit."""
