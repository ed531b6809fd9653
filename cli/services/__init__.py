"""Commands that run a part of pacekeeper: controller, agent, launch, run; and healthcheck.

In: TOML settings and options. Out: a service that runs until SIGTERM, or ranks that train until
their last step. Each command imports its service only when it runs.
"""
