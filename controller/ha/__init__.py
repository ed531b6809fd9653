"""High availability: controllers that share a PostgreSQL database elect a leader.

In: the lease's row (`lease_row`), read and swapped by a thread (`lease_renewer`) that follows pure
rules (`lease`). Out: the right to command (`leadership`), checked before each message to agents.
`leader_election.run` runs such a controller. As a standby it answers reads (`standby_server`) with
state that it loads from the database (`standby_reads`).
"""
