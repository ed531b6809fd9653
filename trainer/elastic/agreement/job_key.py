"""The key by which members of a job sign what they write into its stores. Values only.

A store of torch takes values from any process that reaches it. Each value is therefore written with
an HMAC over its name and content, and rejected without one. The key of a run follows from the job's
secret and the run's session (trainer/elastic/rendezvous.py), so values of an earlier run are
rejected as well.
"""

import hmac
from dataclasses import dataclass, field

from pacekeeper.core.errors import DeniedError

_MAC_BYTES = 32  # SHA-256
_LENGTH_BYTES = 4
MIN_SECRET_BYTES = 16


@dataclass(frozen=True, slots=True)
class JobKey:
    """Signs values with HMAC-SHA256.

    Attributes:
        secret: Known to the members only; empty: signatures protect against nothing but damage.
    """

    secret: bytes = field(repr=False)

    @property
    def is_secret(self) -> bool:
        """Whether others cannot sign alike."""
        return bool(self.secret)

    def of_session(self, session: str) -> "JobKey":
        """Return the key of one run of the job, of which `session` is unlike that of any other."""
        return JobKey(hmac.digest(self.secret, b"session " + session.encode(), "sha256"))

    def sign(self, name: str, content: bytes) -> bytes:
        """Return what a store holds for `content` under `name`: signature, length, content.

        Values of one name may be appended to each other.
        """
        length = len(content).to_bytes(_LENGTH_BYTES, "big")
        return self._mac(name, content) + length + content

    def verify(self, name: str, value: bytes) -> bytes:
        """Return the content of a value, or of several that were appended to each other.

        Raises:
            DeniedError: A part is not signed with this key for this name.
        """
        contents, start = list[bytes](), 0
        while start < len(value) or not contents:  # no value of ours is empty
            head = start + _MAC_BYTES + _LENGTH_BYTES
            end = head + int.from_bytes(value[start + _MAC_BYTES : head], "big")
            content = value[head:end]
            mac = self._mac(name, content)
            is_whole = end <= len(value)
            if not is_whole or not hmac.compare_digest(value[start : start + len(mac)], mac):
                raise DeniedError(
                    f"a message at key {name!r} is not signed with this job's secret",
                    remedy="give all nodes of the job the same --secret-file; if they have it, a "
                    "stranger writes into the job's stores (docs/security.md)",
                )
            contents.append(content)
            start = end
        return b"".join(contents)

    def _mac(self, name: str, content: bytes) -> bytes:
        place = name.encode()
        return hmac.digest(self.secret, b"%d %b %b" % (len(place), place, content), "sha256")


UNSIGNED = JobKey(b"")
"""Of jobs whose stores any process on the network may write to: `launch --insecure-rendezvous`."""
