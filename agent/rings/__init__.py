"""Agent: rings."""
