"""The seam for any trainer, and our own mixture-of-experts trainer."""
