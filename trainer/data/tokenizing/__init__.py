"""Tokenizing: text, JSON lines and saved datasets become one token file.

`tokenize.tokenize` is the entry, for `pacekeeper data tokenize`. `inputs` reads blocks of text,
`encoders` makes tokens of them, in this process or in several (`workers`), and `writer` writes them
in the order of the input. Nothing here imports torch or transformers, or loads code of others.
"""
