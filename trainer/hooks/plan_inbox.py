"""Plans that the controller offers to this rank.

Needs the standard library only; used by `hooks.Hooks`. Each plan is read once; a refused one is not
offered again. A plan whose file is missing or incomplete is looked for again at the next step.
"""

from dataclasses import dataclass

from pacekeeper.core.telemetry.shm_ring import CommandSlot
from pacekeeper.trainer.hooks.ring_writer import Ring


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOffer:
    """A layout that the controller offers, with a verified digest.

    Apply it only to the layout of `base_generation`.
    """

    generation: int
    base_generation: int
    layout_json: bytes


class PlanInbox:
    """Reads the plans named in one rank's command slot."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._newest: tuple[CommandSlot, PlanOffer] | None = None
        self._refused: CommandSlot | None = None

    def above(self, generation: int) -> PlanOffer | None:
        """Return the offered plan if it is above `generation` and not refused, else None."""
        command = self._ring.command()
        wanted = command.plan_generation
        if wanted <= generation or _is_same_plan(command, self._refused):
            return None
        if self._newest is None or not _is_same_plan(command, self._newest[0]):
            data = self._ring.read_plan(wanted, command.plan_sha256)
            if data is None:
                return None
            # Cached: a plan that waits for its step costs no file read per step.
            offer = PlanOffer(
                generation=wanted, base_generation=command.base_generation, layout_json=data
            )
            self._newest = command, offer
        return self._newest[1]

    def refuse(self, generation: int) -> PlanOffer | None:
        """Mark the plan of `generation` as refused; return it if it had been read."""
        command = self._ring.command()
        if command.plan_generation == generation:
            self._refused = command
        if self._newest is None or self._newest[1].generation != generation:
            return None
        return self._newest[1]


def _is_same_plan(command: CommandSlot, other: CommandSlot | None) -> bool:
    """Compare generation, base and digest: other fields of the command may differ."""
    if other is None or other is command:
        return other is not None
    return (command.plan_generation, command.base_generation, command.plan_sha256) == (
        other.plan_generation,
        other.base_generation,
        other.plan_sha256,
    )
