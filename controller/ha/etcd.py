"""The lease's record in etcd: one key, swapped by its revision, by the JSON gateway (etcd 3.4 on).

No lease of etcd's own: who may take over is decided by whoever looks (`lease.py`), so that one
rule serves every store, and the record's term outlives its holder.
"""

import base64
import ssl
from typing import Any

from pacekeeper.controller.ha.http_client import Answer, AwayError, exchange
from pacekeeper.controller.ha.lease import Record, decode_record, encode_record


class EtcdLease:
    """One key of one etcd cluster; an endpoint that does not answer is left for the next one."""

    def __init__(
        self,
        endpoints: tuple[str, ...],
        key: str,
        *,
        timeout_s: float,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._endpoints, self._at = endpoints, 0
        self._key = _base64(key)
        self._timeout_s, self._context = timeout_s, context

    def read(self) -> tuple[Record | None, str]:
        """The record, and its revision; a quorum of etcd has agreed on both. Raises AwayError."""
        found = self._ask("range", {"key": self._key}).get("kvs", [])
        if not found:
            return None, ""
        try:
            text = base64.b64decode(found[0]["value"]).decode()
            return decode_record(text), str(int(found[0]["mod_revision"]))
        except (KeyError, ValueError, TypeError, OverflowError) as error:
            raise AwayError(f"etcd: the key holds no record of ours: {error}") from None

    def write(self, record: Record, expected: str) -> str:
        """The new revision; "" where another one than `expected` is there. Raises AwayError."""
        compare: dict[str, Any] = {"key": self._key, "result": "EQUAL"}
        if expected:
            compare |= {"target": "MOD", "mod_revision": expected}
        else:
            compare |= {"target": "CREATE", "create_revision": "0"}
        put = {"request_put": {"key": self._key, "value": _base64(encode_record(record))}}
        found = self._ask("txn", {"compare": [compare], "success": [put]})
        if not found.get("succeeded", False):
            return ""
        try:
            return str(int(found["header"]["revision"]))
        except (KeyError, ValueError, TypeError, OverflowError) as error:
            raise AwayError(f"etcd: an answer without a revision: {error}") from None

    def _ask(self, what: str, body: dict[str, Any]) -> Any:
        url = f"{self._endpoints[self._at]}/v3/kv/{what}"
        try:
            answer: Answer = exchange(
                "POST", url, body, timeout_s=self._timeout_s, context=self._context
            )
            if answer.status != 200:
                why = answer.body.get("error") or answer.body.get("message") or "no reason given"
                raise AwayError(f"{url}: HTTP {answer.status}: {why}")
        except AwayError:
            self._at = (self._at + 1) % len(self._endpoints)
            raise
        return answer.body


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
