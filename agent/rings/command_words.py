"""What a ring must say in its command slot, when what it says already meets what was told. Pure."""

from dataclasses import replace

from pacekeeper.core.telemetry.shm_ring import CommandSlot


def own_words(said: CommandSlot, life: int) -> CommandSlot:
    """What a ring of this life says already; words that were meant for another one are dropped."""
    is_meant = said.life in (0, life)
    return replace(said, life=life) if is_meant else CommandSlot(life=life)


def merged(own: CommandSlot, told: CommandSlot) -> CommandSlot:
    """What a ring just opened must say: its own words, and what was told since."""
    own = own_words(own, told.life)
    newest = told if told.plan_generation else own
    return replace(
        newest,
        dead_ranks=own.dead_ranks | told.dead_ranks,
        suspect_ranks=told.suspect_ranks or own.suspect_ranks,
        probe=max(own.probe, told.probe),
        term=max(own.term, told.term),
    )
