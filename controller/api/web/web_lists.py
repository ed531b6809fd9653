"""What of a long list is shown on a page: what is looked for, a hundred at a time."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

MOST_ROWS = 100
MOST_FIND = 200  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a reader asked for. `find`: words that each row must have, in lower case."""

    find: str = ""
    first: int = 0
    open_only: bool = False

    @classmethod
    def of(cls, query: Mapping[str, str]) -> "Asked":
        """From an address; what is no number of a row is the first one."""
        text = query.get("first", "")
        is_number = text.isascii() and text.isdigit() and len(text) < 9
        return cls(
            find=query.get("find", "")[:MOST_FIND].strip(),
            first=int(text) if is_number else 0,
            open_only=query.get("open", "") == "1",
        )

    def query(self, first: int | None = None) -> str:
        """The same as part of an address, with its question mark; `first`: another page."""
        values = {
            "find": self.find,
            "open": "1" if self.open_only else "",
            "first": str(self.first if first is None else first),
        }
        said = {name: value for name, value in values.items() if value not in ("", "0")}
        return f"?{urlencode(said)}" if said else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A page of a list. `total`: how many there are of what was asked for."""

    rows: Sequence[Any]
    first: int
    total: int
    asked: Asked

    @property
    def last(self) -> int:
        """Number of the last row, counted from 1."""
        return self.first + len(self.rows)

    @property
    def before(self) -> str | None:
        """Where the rows before these are; None: these are the first."""
        return self.asked.query(max(0, self.first - MOST_ROWS)) if self.first else None

    @property
    def after(self) -> str | None:
        """Where the rows after these are; None: these are the last."""
        return self.asked.query(self.last) if self.last < self.total else None


def shown(rows: Iterable[Any], asked: Asked, words_of: Callable[[Any], str]) -> Shown:
    """Of `rows` those that have all words, from the one asked for on."""
    words = asked.find.lower().split()
    found = list(rows)
    if words:
        told = ((row, words_of(row).lower()) for row in found)
        found = [row for row, text in told if all(word in text for word in words)]
    first = asked.first if asked.first < len(found) else 0
    return Shown(rows=found[first : first + MOST_ROWS], first=first, total=len(found), asked=asked)
