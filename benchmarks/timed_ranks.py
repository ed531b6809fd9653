"""Ranks that note when each part of a recovery was over, beside their step logs."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from pacekeeper.trainer.elastic.agreement.consensus import Agreement
from pacekeeper.trainer.elastic.engine_worker import EngineWorker
from pacekeeper.trainer.elastic.launch_spec import RankSpec
from pacekeeper.trainer.elastic.loop import rank_main

PARTS = ("notice", "leave", "agree", "form", "move", "redo")


@dataclass(frozen=True, slots=True)
class TimedRank:
    """The body of a rank's process, which writes its marks to `parts-RANK.jsonl`."""

    def __call__(self, spec: RankSpec) -> None:
        path = Path(spec.run_dir, f"parts-{spec.rank}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", buffering=1)

        def mark(owner: Any, name: str, *, before: str = "", after: str = "") -> None:
            original: Callable[..., Any] = getattr(owner, name)

            @wraps(original)
            def timed(*given: Any, **named: Any) -> Any:
                if before:
                    file.write(json.dumps([before, time.monotonic()]) + "\n")
                result = original(*given, **named)
                if after:
                    file.write(json.dumps([after, time.monotonic()]) + "\n")
                return result

            setattr(owner, name, timed)

        mark(EngineWorker, "leave", before="notice", after="leave")
        mark(Agreement, "reach", after="agree")
        mark(EngineWorker, "form", after="form")
        mark(EngineWorker, "do_move", after="move")
        rank_main(spec)


def parts_of(run_dir: Path, rank: int, began_s: float, ended_s: float) -> dict[str, float]:
    """Seconds of the parts of a rank's recovery, in order.

    Args:
        run_dir: Of the job.
        rank: A survivor.
        began_s: When others were struck, by the monotonic clock.
        ended_s: When the rank had committed the next step.
    """
    lines = (run_dir / f"parts-{rank}.jsonl").read_text().splitlines()
    marks = {name: at_s for name, at_s in map(json.loads, lines) if began_s < at_s < ended_s}
    at_s = [began_s, *(marks.get(name, began_s) for name in PARTS[:-1]), ended_s]
    return {
        name: after - before for name, before, after in zip(PARTS, at_s[:-1], at_s[1:], strict=True)
    }
