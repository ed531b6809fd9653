"""`pacekeeper plan`: the planners of the controller for other trainers, without a controller.

In: files (loads per layer and expert, or a description of model and devices) and options. Out: a
plan with its proof or forecast, as table, JSON or plot. `command` plans expert placements,
`partition` plans layers, shards and rows; `*_text` format the plans.
"""
