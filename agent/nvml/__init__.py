"""Agent: nvml."""
