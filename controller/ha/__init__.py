"""Several controllers under one lease: election, replication of the store, standbys."""
