"""The lease's record in Kubernetes: a Lease of coordination.k8s.io/v1, swapped by resourceVersion.

The record stands in an annotation; the Lease's own fields tell people the same (`kubectl get
lease`). A Lease that another program holds is left alone.
"""

import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from typing import Any

from pacekeeper.controller.ha.http_client import Answer, AwayError, exchange, read_token
from pacekeeper.controller.ha.lease import Record, decode_record, encode_record

ANNOTATION = "pacekeeper/record"
MOST_TRANSITIONS = (1 << 31) - 1  # the field has 32 bits, a term has more


class KubernetesLease:
    """One Lease. `api`: https://HOST:PORT; `token_file`: of the service account, read anew."""

    def __init__(
        self,
        api: str,
        namespace: str,
        name: str,
        *,
        token_file: Path,
        context: ssl.SSLContext,
        timeout_s: float,
    ) -> None:
        self._all = f"{api}/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._namespace, self._name = namespace, name
        self._token_file, self._context, self._timeout_s = token_file, context, timeout_s
        self._metadata: Mapping[str, Any] = {}  # as read last: what others wrote there stays

    def read(self) -> tuple[Record | None, str]:
        """The record, and the version of its Lease. Raises AwayError."""
        answer = self._ask("GET", f"/{self._name}", None)
        if answer.status == 404:
            return None, ""
        if answer.status != 200:
            raise _refusal(answer)
        metadata, spec = _part(answer.body, "metadata"), _part(answer.body, "spec")
        self._metadata = metadata
        text = _part(metadata, "annotations").get(ANNOTATION)
        if not isinstance(text, str):
            holder = spec.get("holderIdentity") or "nobody"
            raise AwayError(f"Lease {self._name} is of another program, held by {holder}")
        try:
            return decode_record(text), _version(metadata)
        except ValueError as error:
            raise AwayError(f"Lease {self._name} holds no record of ours: {error}") from None

    def write(self, record: Record, expected: str) -> str:
        """The new version; "" where another one than `expected` is there. Raises AwayError."""
        is_new = not expected
        metadata: dict[str, Any] = {"name": self._name, "namespace": self._namespace}
        if not is_new:
            if _version(self._metadata) != expected:
                raise AwayError("the Lease was not read since it changed")
            kept = ("labels", "annotations", "ownerReferences", "finalizers")
            metadata |= {key: self._metadata[key] for key in kept if key in self._metadata}
            # Another Lease of this name, made since, is refused by its uid.
            metadata |= {key: self._metadata[key] for key in ("uid", "resourceVersion")}
        annotations = {**_part(metadata, "annotations"), ANNOTATION: encode_record(record)}
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata | {"annotations": annotations},
            "spec": _spec(record),
        }
        answer = self._ask("POST" if is_new else "PUT", "" if is_new else f"/{self._name}", lease)
        if answer.status in (404, 409):
            return ""
        if answer.status not in (200, 201):
            raise _refusal(answer)
        self._metadata = _part(answer.body, "metadata")
        return _version(self._metadata)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> Answer:
        return exchange(
            method,
            f"{self._all}{path}",
            body,
            timeout_s=self._timeout_s,
            context=self._context,
            token=read_token(self._token_file),
        )


def _spec(record: Record) -> dict[str, Any]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return {
        "holderIdentity": record.holder,
        "leaseDurationSeconds": ceil(record.duration_s),
        "leaseTransitions": min(record.term, MOST_TRANSITIONS),
        "renewTime": now,
    }


def _part(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = body.get(name)
    return found if isinstance(found, dict) else {}


def _version(metadata: Mapping[str, Any]) -> str:
    uid, version = metadata.get("uid"), metadata.get("resourceVersion")
    if not isinstance(uid, str) or not isinstance(version, str) or not version:
        raise AwayError("a Lease without uid and resourceVersion")
    return f"{uid}/{version}"


def _refusal(answer: Answer) -> AwayError:
    why = answer.body.get("message") or "no reason given"
    return AwayError(f"Kubernetes: HTTP {answer.status}: {why}")
