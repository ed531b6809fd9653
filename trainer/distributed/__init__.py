"""Process groups, collectives and key-value stores that survive the death of a peer."""
