"""The engine: trains a Hugging Face mixture of experts on any layout."""
