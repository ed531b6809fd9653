"""Metrics, alerts and incident history of the controller.

In: the state, and commands of the state machine. Out: the page that Prometheus scrapes (`metrics`),
notifications (`webhook`, `alerts`), and timelines of incidents and jobs in the store
(`timeline_writer`), of which `explain` makes explanations. Nothing here changes the state.
"""
