"""The layout of a job: which rank holds which block of the model and computes which share.

In: ranks, failure domains, speeds. Out: layouts, their JSON form, their differences, and the
layouts that a job continues with when ranks leave or join (`resize`). `pipeline_schedule`
has the order of work within pipelines.
"""
