"""`pacekeeper data`: make token files of text, and check token files.

In: text files, JSON lines, saved datasets, token files. Out: token files for the trainer, progress
on stderr, one line per result. `command` has the commands, `progress` the line of progress.
"""
