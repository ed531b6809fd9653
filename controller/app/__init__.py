"""The controller's process: starts and stops its services, and drives the state machine.

In: settings; events of agents, people and timers. Out: stored state, and executed commands.
`controller` is the service with its loop and its store, `effects` executes the commands that the
state machine returns and runs the planner in a thread. `ha` and the command line start it.
"""
