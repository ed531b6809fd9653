"""Trainer: emulation."""
