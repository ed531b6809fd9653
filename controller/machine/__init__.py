"""The controller's state machine: (state, event, now) -> (state, commands), pure.

`machine.advance` is the entry point; the app calls it for each event. In: events (node reports,
ticks, decisions, operator orders). Out: a new state, and commands that the app executes. The
machine drives detection, mitigation and policy; it performs no input or output.
"""
