"""All settings, one module per table or process, and the TOML loader.

In: the text of a TOML file, options of the command line. Out: frozen settings, or errors that name
file, key and expectation. `read_config` and `override` of `loader` are the entry points.
"""
