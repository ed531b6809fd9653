"""Tables and bars of `benchmarks/simulate_resihp.py`: what was found, beside what is printed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.resihp_paper import LARGE_OVER

CLOSE = 0.15  # of what is printed

Row = dict[str, Any]


def rounded(value: Any) -> Any:
    """All numbers of a nested value to four digits behind the point."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: rounded(of) for key, of in value.items()}
    return [rounded(of) for of in value] if isinstance(value, list | tuple) else value


def show_slow(rows: Sequence[Row], console: Console) -> None:
    table = Table(title="one slow device: over the degraded run (printed), of the fluid limit")
    for name in ("model", "severity", "speed", "adaptra", "greyhound", "resihp", "ours", "whole",
                 "resihp of fluid", "ours of fluid", "least", "fluid limit",
                 "implied drop"):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        over, fluid = row["over_degraded"], row["fluid"]
        theirs = row["printed"]
        table.add_row(
            row["model"],
            row["severity"],
            f"{row['speed']:.2f}",
            f"{over['adaptra']:.2f}",
            f"{over['greyhound']:.2f} ({theirs['greyhound'][1]:.2f})",
            f"{over['resihp']:.2f} ({theirs['resihp'][1]:.2f})",
            f"{over['ours']:.2f}",
            f"{over['whole']:.2f}",
            f"{fluid['resihp']:.3f}",
            f"{fluid['ours']:.3f}",
            f"{row['fluid_min']:.3f}",
            f"{row['most']:.2f}",
            f"{row['implied_drop']:.2f}",
        )
    console.print(table)


def show_stops(title: str, rows: Sequence[Row], console: Console) -> None:
    names = list(rows[0]["samples_per_s"])
    table = Table(title=title)
    for name in ("model", "every", *names):
        table.add_column(name, justify="right")
    for row in rows:
        rates, printed = row["samples_per_s"], row["printed"]
        cells = [
            f"{rates[name]:.2f}" + (f" ({printed[name]:.2f})" if name in printed else "")
            for name in names
        ]
        table.add_row(row["model"], row["interval"], *cells)
    console.print(table)


def show_rates(rows: Sequence[Row], console: Console) -> None:
    """The large job at several rates of faults."""
    table = Table(
        title="256 devices, a fault every ..., mended after ...: over (most: of the limit)"
    )
    for name in ("every", "mended after", "lost", "ours over resihp"):
        table.add_column(name, justify="right")
    for name in LARGE_OVER:
        table.add_column(f"ours over {name}+ (most)", justify="right")
        table.add_column(f"resihp over {name}+", justify="right")
    for row in rows:
        cells = [f"{row['every_h']:g} h", f"{row['mended_h']:g} h", f"{row['lost']:.1%}",
                 f"{row['resihp']:.3f}"]  # fmt: skip
        for name in LARGE_OVER:
            cells += [
                f"{row[name]:.3f} ({row[f'most_{name}']:.3f})",
                f"{row[f'resihp_{name}']:.3f}",
            ]
        table.add_row(*cells)
    console.print(table)


def summary(
    slow: Sequence[Row],
    stops: Sequence[Row],
    mixed: Sequence[Row],
    of_large: Row,
    *,
    is_whole: bool = True,
) -> Row:
    """All bars, by name. Those of the large job count where its span is whole."""
    fluid = [row["fluid"]["ours"] for row in slow]
    least = min(row["fluid_min"] for row in slow)
    names = ("greyhound", "resihp", "resihp_over_greyhound")
    off = {name: [abs(row["off"][name]) for row in slow] for name in names}
    won = sum(row["is_won"] for row in slow)
    result = {
        "cells": len(slow),
        "cells_won": won,
        "median_fluid_fraction": round(float(np.median(fluid)), 4),
        "min_fluid_fraction": round(least, 4),
        "whole_cells_won": sum(row["is_whole_won"] for row in slow),
        "stop_cells": len(stops),
        "stop_cells_won": sum(row["is_won"] for row in stops),
        "mixed_cells": len(mixed),
        "mixed_cells_won": sum(row["is_won"] for row in mixed),
        "large": of_large,
        "large_bars": LARGE_OVER,
        **{f"{n}_within_15": sum(x <= CLOSE for x in of) for n, of in off.items()},
    }
    result["met"] = bool(
        won == len(slow)
        and result["median_fluid_fraction"] >= 0.95
        and least >= 0.88
        and all(row["is_won"] for row in (*stops, *mixed))
        and (not is_whole or all(of_large[name] >= bar for name, bar in LARGE_OVER.items()))
    )
    return result
