"""What became of a run's tokens, as one rank knows it: routed to each expert, saved, lost. Pure.

A rank counts the layers it runs. All ranks of a stage count these alike, the others know less of
them, so the most that any rank says is true: where layers change hands ranks tell each other, and
a manifest takes the most of all parts.
"""

from collections.abc import Mapping, Sequence

from pacekeeper.core.checkpoint.lost_tokens import plt
from pacekeeper.core.checkpoint.manifest import Account
from pacekeeper.core.config.controller import TrainConfig
from pacekeeper.core.layout.layout import Block, Layout


class TokenBooks:
    """One rank's. `routed`, `saved`: tokens of each expert, [layer][expert], up to now and when it
    was saved last; `lost`: by layer, in `num_faults` restores.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self.routed = [[0] * config.num_experts for _ in range(config.num_layers)]
        self.saved = [list(counts) for counts in self.routed]
        self.lost = [0] * config.num_layers
        self.num_faults = 0

    @property
    def account(self) -> Account:
        """Of all tokens so far."""
        routed = tuple(map(tuple, self.routed))
        return Account(routed=routed, lost=tuple(self.lost), num_faults=self.num_faults)

    def count(self, routed: Mapping[int, Sequence[int]]) -> None:
        """A step was committed; its tokens routed to each expert, by layer."""
        for layer, counts in routed.items():
            for expert, tokens in enumerate(counts):
                self.routed[layer][expert] += tokens

    def told(self) -> list[float]:
        """All of it, in as many numbers on every rank."""
        tables = (counts for table in (self.routed, self.saved) for counts in table)
        return [*(n for counts in tables for n in counts), *self.lost, self.num_faults]

    def learn(self, all_told: Sequence[Sequence[float]]) -> None:
        """What all ranks said, this one among them."""
        most = iter([int(max(column)) for column in zip(*all_told, strict=True)])
        for table in (self.routed, self.saved):
            for counts in table:
                counts[:] = [next(most) for _ in counts]
        self.lost = [next(most) for _ in self.lost]
        self.num_faults = next(most)

    def begin_anew(self, account: Account, losses: Sequence[int], *, is_fault: bool) -> None:
        """The state is now what a checkpoint holds: its account, and by layer what going back to it
        lost.
        """
        blank = [[0] * len(counts) for counts in self.routed]
        self.routed = [list(counts) for counts in account.routed] or blank
        before = account.lost or (0,) * len(self.routed)
        more = losses or (0,) * len(self.routed)
        self.lost = [a + b for a, b in zip(before, more, strict=True)]
        self.num_faults = account.num_faults + is_fault
        self.forget_saves()

    def fall_back(self, tokens: Mapping[Block, int]) -> int:
        """These experts alone are as they were when they had seen so many tokens; what they lost.

        What a copy had seen in another course of the run was seen again in this one.
        """
        before = sum(self.lost)
        for block, seen in tokens.items():
            self.lost[block.layer] += max(0, self.routed[block.layer][block.index] - seen)
        self.num_faults += 1
        self.forget_saves()
        return sum(self.lost) - before

    def forget_saves(self) -> None:
        """As if everything had just been saved: nothing is known to be older."""
        self.saved = [list(counts) for counts in self.routed]

    def unsaved(self) -> list[list[int]]:
        """Of each expert, [layer][expert]: tokens since it was saved."""
        return [
            [now - then for now, then in zip(counts, saved, strict=True)]
            for counts, saved in zip(self.routed, self.saved, strict=True)
        ]

    def plt_of_run(self, step: int) -> float:
        """The share of lost tokens in all that the whole run will have routed, as far as it went
        on as before `step`.
        """
        whole = max(1.0, self._config.steps / max(1, step))
        return plt(self.lost, [whole * sum(counts) for counts in self.routed])


def account_numbers(account: Account, layout: Layout) -> list[float]:
    """An account as numbers, as many for all accounts of one model; see `account_of`."""
    routed = account.routed or [[0] * len(on) for on in layout.experts]
    lost = account.lost or [0] * layout.num_layers
    return [*(float(n) for counts in routed for n in counts), *lost, account.num_faults]


def account_of(numbers: Sequence[float], layout: Layout) -> Account:
    """The account that these numbers say."""
    rest = iter(map(int, numbers))
    return Account(
        routed=tuple(tuple(next(rest) for _ in on) for on in layout.experts),
        lost=tuple(next(rest) for _ in layout.experts),
        num_faults=next(rest),
    )
