"""The command line: one command, `pacekeeper`, with one sub-command per task.

`main` holds the table of commands; each sub-package holds the commands of one task (observe,
operate, services, admin, planning, analysis, demo, doctor, top) and `common` what they share.
Modules named `*_text` format answers for people; commands print JSON with --json. Commands reach a
controller over gRPC only and hold no state.
"""
