"""Token shares over given replica ranks, so that the slowest rank is as fast as possible.

`min_max` splits all layers at once, `linear_program` solves one layer exactly, `proportional`
returns shares close to speed-proportional ones within a slack. None of them moves a replica.
"""
