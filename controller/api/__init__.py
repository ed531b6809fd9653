"""The controller's services for people and programs: status, operator actions, web page.

In: the immutable state and the stored history. Out: messages of the status service; events for the
state machine. Access control is in `auth`, the web page in `web`.
"""
