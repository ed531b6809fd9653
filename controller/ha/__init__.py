"""Several controllers under one lease: election, replication of the store, standbys.

In: a lease in etcd or Kubernetes. Out: a `Leadership` for the app: the term to command in, and
`ship`, which returns once all in-sync replicas have stored a change. `lease` holds the rules
(pure); `leader_election` runs a controller as leader or standby.
"""
