"""The stream to the controller: builds reports, keeps them until acknowledged, receives commands.

In: `RingBatch`es and samples. Out: `NodeReport` messages in order, each at least once.
"""
