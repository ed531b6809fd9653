"""The way of a plan after its decision: approval, probe, offer, verification, rollback. Pure.

In: a `State` or `JobState`, a `Decision`, answers of operators and ranks. Out: the job with its
plan in another phase (`state.plan_phase`), and commands to agents. `approvals` and `overrides` hold
proposals and orders, `probes` the check before costly plans, `rollout` the offer and its
withdrawal, `backoff` the wait after a rejection, `verification` the comparison with the forecast,
`migration_costs` the price of a move, `notices` the messages on dead and suspect ranks. Called by
the state machine; decisions are made in `policy`.
"""
