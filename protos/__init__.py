"""The wire format: sources and generated code of pacekeeper.v1, converters, channels and TLS.

Sources lie in `pacekeeper/v1/` and, for protocols of other tools, in `peers/`; `generate` makes the
Python modules. `convert` translates messages; `tls` opens channels and reads certificates and
tokens; `metrics_server` serves Prometheus.
"""
