"""The controller's state, and the events and commands of its machine, as frozen values.

The vocabulary of the controller's pure packages: it imports nothing of them. In: records and
layouts of `core`, detector state of `predictor`. Out: `State`, `JobState`, events, commands,
`PlanningSnapshot`, the phases of a plan. Nothing here decides anything.
"""
