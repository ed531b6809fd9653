"""Protos: convert."""
