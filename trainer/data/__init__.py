"""Training data of the engine: token files, rows by step, batches, and the tokenizing of text.

In: token files (`token_stream.open_tokens`) and a layout's shares. Out: `batch.Batch`, any places
of any step (`sampler.Sampler`), which are a function of seed, step and place alone. `tokenizing`
writes token files. Nothing here communicates, and only `tokenizing` loads tokenizers.
"""
