"""`pacekeeper doctor`: checks of this machine, or of a settings file before it is used.

In: the ring directory, or a TOML file (--config). Out: a list of `checks.Check` (name, health,
finding, remedy, exit code), as table or JSON; the highest exit code of what is broken.
`machine_checks` holds the checks of the machine; `config_checks` selects those of a file from
`controller_checks`, `agent_checks` and `file_checks`. Nothing is started.
"""
