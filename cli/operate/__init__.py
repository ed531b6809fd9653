"""Commands by which an operator instructs a controller: approve, deny, cordon, pause, dry-run.

In: a proposal number, node, JOB/RANK or job, with the operator's name and reason. Out: one call of
the operator service and the resulting order or proposal. They need the role operator where the
controller has access control.
"""
