"""The wire: pacekeeper.v1 messages, generated code and the converters."""
