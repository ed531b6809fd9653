"""Agent: health."""
