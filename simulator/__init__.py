"""A cluster of any size on this machine."""
