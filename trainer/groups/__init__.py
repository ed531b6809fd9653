"""Process groups of the engine: one small interface, and what stands behind it."""
