"""The web page: `start.build_web_server` builds it if it is configured.

Pages (HTML) and data (JSON) are rendered from the state; actions go through `OperatorActions`.
Needs the extra pacekeeper[web].
"""
