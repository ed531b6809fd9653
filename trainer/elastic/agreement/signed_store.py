"""A client of a store whose values are signed; process groups of torch meet in it, too."""

from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from pacekeeper.trainer.elastic.agreement.job_key import JobKey


class SignedStore(Store):
    """Signs what it writes, and rejects what it reads unsigned.

    Counters (`add`) have no signature, and any process that reaches the store can delete keys.

    Args:
        store: Holds the values.
        key: Of the job, or of one run of it.
        prefix: Of all names.
    """

    def __init__(self, store: TCPStore, key: JobKey, prefix: str = "") -> None:
        super().__init__()
        self._store: Any = store  # of which the stubs lack bytes and `append`
        self._key = key
        self._prefix = f"{prefix}/" if prefix else ""

    @property
    def unsigned(self) -> Store:
        """The same names without signatures, in C++ only: for groups that torch itself ends."""
        return PrefixStore(self._prefix.removesuffix("/"), self._store)

    def clone(self) -> Store:
        return self

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(*self._signed(key, value))

    def append(self, key: str, value: str | bytes) -> None:
        """Add to the end of a key's value."""
        self._store.append(*self._signed(key, value))

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value.

        Raises:
            DeniedError: It is not signed with the key of the job.
        """
        name = self._prefix + key
        return self._key.verify(name, self._store.get(name))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key unless it is set, and return the value that stands; raises as `get`.

        Args:
            key: Its name.
            expected: Empty: others have no signature to compare.
            desired: Its value.
        """
        assert not expected, "only a key that is not set can be compared"
        name, value = self._signed(key, desired)
        return self._key.verify(name, self._store.compare_set(name, "", value))

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(self._prefix + key))

    def has_extended_api(self) -> bool:
        return False

    def add(self, key: str, value: int) -> int:
        return int(self._store.add(self._prefix + key, value))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check([self._prefix + key for key in keys]))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        names = [self._prefix + key for key in keys]
        if timeout is None:
            self._store.wait(names)
        else:
            self._store.wait(names, timeout)

    def _signed(self, key: str, content: str | bytes) -> tuple[str, bytes]:
        name = self._prefix + key
        content = content.encode() if isinstance(content, str) else content
        return name, self._key.sign(name, content)
