"""Analyses a recorded run: residuals, slow ranks, stragglers of collectives, heat map."""
