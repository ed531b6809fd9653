"""The ring files of this node: reads records and writes commands.

In: ring, layout and plan files below the ring directory, written by ranks and launchers. Out: one
`RingBatch` per job and poll; commands, heartbeats and plan files for the ranks. No network here.
"""
