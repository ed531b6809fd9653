"""Plans that the controller offers this rank: each read once, and none again that was refused.

Standard library only: part of the seam. Files only, no clock; a plan whose file is not here yet,
or not whole, is looked for again at the next step.
"""

from dataclasses import dataclass

from pacekeeper.core.telemetry.shm_ring import CommandSlot
from pacekeeper.trainer.hooks.ring_writer import Ring


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOffer:
    """A layout the controller proposes; its digest was checked. Apply it only on its base."""

    generation: int
    base_generation: int
    layout_json: bytes


class Offers:
    """What one rank's command slot says of plans."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._newest: tuple[CommandSlot, PlanOffer] | None = None
        self._refused: CommandSlot | None = None

    def above(self, generation: int) -> PlanOffer | None:
        """The plan that is offered, if it is newer than `generation` and not refused."""
        command = self._ring.command()
        wanted = command.plan_generation
        if wanted <= generation or _is_same_plan(command, self._refused):
            return None
        if self._newest is None or not _is_same_plan(command, self._newest[0]):
            data = self._ring.read_plan(wanted, command.plan_sha256)
            if data is None:
                return None
            # Kept: a plan that waits for its step must not cost a file read at every step.
            offer = PlanOffer(
                generation=wanted, base_generation=command.base_generation, layout_json=data
            )
            self._newest = command, offer
        return self._newest[1]

    def refuse(self, generation: int) -> PlanOffer | None:
        """Mark the plan of this generation; the plan, if it had been read."""
        command = self._ring.command()
        if command.plan_generation == generation:
            self._refused = command
        if self._newest is None or self._newest[1].generation != generation:
            return None
        return self._newest[1]


def _is_same_plan(command: CommandSlot, other: CommandSlot | None) -> bool:
    """Deaths may be said in between; a plan is its generation, its base and its digest."""
    if other is None or other is command:
        return other is not None
    return (command.plan_generation, command.base_generation, command.plan_sha256) == (
        other.plan_generation,
        other.base_generation,
        other.plan_sha256,
    )
