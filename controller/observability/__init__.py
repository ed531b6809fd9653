"""Metrics, alerts and incident history of the controller.

In: the state, and commands of the state machine. Out: the page that Prometheus scrapes,
notifications of the webhook, and timelines in the store. Nothing here changes the state.
"""
