"""How survivors agree on who they are and how to go on: pure decisions, and the protocol."""
