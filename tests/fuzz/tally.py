"""What each parser was fuzzed so far, kept over several runs: processor time, cases, inputs.

Time counts for a parser as long as the code that its cases went through is the same; once that has
changed it begins anew, with the inputs that were kept; what it had before is shown beside.
"""

import json
import os
from pathlib import Path
from typing import Any

from fuzz.coverage import digest

EMPTY: dict[str, Any] = {
    "cpu_minutes": 0.0, "minutes": 0.0, "cases": 0, "runs": 0, "ways": 0, "files": [], "found": [],
    "earlier_cpu_minutes": 0.0, "earlier_cases": 0,
}  # fmt: skip


class Tally:
    """A JSON file and, beside it, a folder of inputs for each parser."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def of(self, name: str) -> dict[str, Any]:
        """Of one parser, on the code as it is now."""
        row = self._rows.get(name)
        if row is None:
            return dict(EMPTY)
        if digest(row["files"]) == row["digest"]:
            return {**EMPTY, **row}
        earlier = {
            f"earlier_{key}": row[key] + row.get(f"earlier_{key}", 0)
            for key in ("cpu_minutes", "cases")
        }
        return {**EMPTY, **earlier}

    def corpus(self, name: str) -> Path:
        """Where its inputs are kept."""
        folder = self._path.with_suffix(".corpus") / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def add(self, name: str, result: dict[str, Any]) -> dict[str, Any]:
        """One run more; the sum."""
        row = self.of(name)
        for key in ("cpu_minutes", "minutes", "cases"):
            row[key] += result[key]
        row["runs"] += 1
        row["ways"] = max(row["ways"], result["ways"])
        row["files"] = sorted({*row["files"], *result["files"]})
        row["digest"] = digest(row["files"])
        row["found"] = sorted({*row["found"], *(one["what"] for one in result["found"])})
        self._rows[name] = row
        whole = self._path.with_suffix(".new")
        whole.write_text(json.dumps(self._rows, indent=1))
        os.replace(whole, self._path)
        return row

    def table(self, names: list[str]) -> str:
        """For people."""
        lines = [
            f"{'parser':<24}{'CPU min':>8}{'minutes':>8}{'cases':>12}{'ways':>7}"
            f"{'other code':>12}{'cases':>12}  found"
        ]
        rows = [(name, self.of(name)) for name in names]
        lines += [
            f"{name:<24}{row['cpu_minutes']:>8.1f}{row['minutes']:>8.1f}{row['cases']:>12,}"
            f"{row['ways']:>7}{row['earlier_cpu_minutes']:>12.1f}{row['earlier_cases']:>12,}"
            f"  {'; '.join(row['found']) or 'nothing'}"
            for name, row in rows
        ]
        cases = sum(row["cases"] for _, row in rows)
        minutes = sum(row["cpu_minutes"] for _, row in rows)
        earlier_minutes = sum(row["earlier_cpu_minutes"] for _, row in rows)
        earlier = sum(row["earlier_cases"] for _, row in rows)
        total = f"{'all':<24}{minutes:>8.1f}{'':>8}{cases:>12,}{'':>7}{earlier_minutes:>12.1f}"
        return "\n".join([*lines, f"{total}{earlier:>12,}"])
