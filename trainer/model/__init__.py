"""Models of transformers as typed blocks: built on the meta device, filled block by block."""
