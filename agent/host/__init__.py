"""Agent: host."""
