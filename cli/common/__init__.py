"""Shared by all commands: controller channel, settings, options, logging, sparklines.

In: `ClientConfig`, TOML files and command-line values. Out: an authenticated channel
(`client.open_channel`), settings (`settings.load_settings`), click decorators (`options`). Imports
no other package of the command line.
"""
