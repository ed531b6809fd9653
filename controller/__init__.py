"""One service for many jobs: a pure machine with thin shells around it."""
