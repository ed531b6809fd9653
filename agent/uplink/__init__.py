"""Agent: uplink."""
