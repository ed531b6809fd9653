"""Reads that a standby answers: their health service, the header with their age, its reader.

A controller that stands by answers unary calls of the status service from what it read last, and
adds the header `AGE`. A client that does not look for it takes the answer for the leader's.
"""

from collections.abc import Callable
from typing import Any

import grpc

READS = "reads"
"""The health service of a controller that answers reads; "" is that of the leader."""
AGE = "pacekeeper-age-s"
LEADER = "pacekeeper-leader"


class AgeReader(grpc.UnaryUnaryClientInterceptor):
    """Reports the age of answers that a standby gave.

    Args:
        on_stale: Called with the age in seconds and the leader's address (empty: none is known).
    """

    def __init__(self, on_stale: Callable[[float, str], None]) -> None:
        self._on_stale = on_stale

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        """A call with one response."""
        answer = continuation(details, request)
        if answer.code() is grpc.StatusCode.OK:
            headers = {name: value for name, value in answer.initial_metadata() or ()}
            if AGE in headers:
                self._on_stale(float(headers[AGE]), headers.get(LEADER, ""))
        return answer
