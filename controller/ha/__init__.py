"""Several controllers on one PostgreSQL database: election by a row of it, standbys.

In: the row of the lease (`lease_row`), read and swapped by a thread (`lease_renewer`) as the pure
rules say (`lease`). Out: the right to command (`leadership`), asked at each message to agents.
`leader_election.run` is the entry point of a controller with such a store; while it stands by it
answers reads (`standby_server`) from what the database has (`standby_reads`).
"""
