"""The mark of an answer that is not the leader's: its age, and the leader's address."""

from dataclasses import dataclass

from pacekeeper.core.text import format_s

STANDS_BY = "this controller stands by"


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """How old the state of a standby is.

    Attributes:
        age_s: Seconds since the database was read; infinity: nothing was read yet.
        leader: Address of the last known leader; empty: none.
    """

    age_s: float
    leader: str

    @property
    def is_readable(self) -> bool:
        """Whether there is anything to answer with."""
        return self.age_s < float("inf")

    @property
    def reason(self) -> str:
        """Why this controller executes nothing."""
        if not self.leader:
            return f"{STANDS_BY}, and none leads now"
        return f"{STANDS_BY}; the last to lead is {self.leader}"

    @property
    def notice(self) -> str:
        """The line above a page."""
        age = f"{format_s(self.age_s)} old" if self.is_readable else "not read yet"
        return f"{self.reason}. What is shown here is {age}, without live measurements."
