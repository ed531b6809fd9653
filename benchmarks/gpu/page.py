"""Makes the page `docs/gpu.md`, and the lines for the terminal.

Figures come as the JSON has them; what each means is in the dataclass of its section, which is
read as text, since the modules of sections need torch.
"""

import ast
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.runner import Outcome, Status
from benchmarks.gpu.sections import SECTIONS, Section

_HEAD = """# On a GPU

`make gpu` measures the engine, its clocks, the detector and the agent's reader on the GPUs of a
machine, in at most 8 minutes and without a network, and runs `tests/gpu`. It writes this page and
`gpu.json` beside it. Settings of devices are never touched.

```sh
make gpu GPU_PYTHON=python3             # an interpreter with your build of torch for CUDA
make gpu GPU_PYTHON=python3 GPU_OUT=out # write the page and gpu.json elsewhere
```

The interpreter needs torch 2.10 or later with CUDA, numpy, scipy, pydantic, nvidia-ml-py,
safetensors, tokenizers, transformers 5.23, click and rich; for the tests pytest. pacekeeper is
taken from this checkout and need not be installed. What is missing is said, and costs the sections
that need it. Packages that the machine lacks can be brought as wheels: `pip install --no-deps
--target DIR *.whl`, then `PYTHONPATH=DIR make gpu`.

Each section runs in a process of its own with a limit of time: one that fails or hangs costs only
itself. `python -m benchmarks.gpu --device cpu --out DIR` rehearses them in small on a CPU; its
figures mean nothing.
"""


def page(run: Mapping[str, Any] | None, sections: Sequence[Section] = SECTIONS) -> str:
    """Return the page.

    Args:
        run: The content of gpu.json; None: nothing was run yet.
        sections: All sections.
    """
    if run is None:
        parts = [_HEAD, "## Not run\n\nNo GPU was at hand yet. What will be measured:\n"]
        for section in sections:
            needs = " Needs two GPUs." if section.least_devices > 1 else ""
            parts.append(f"- **{section.title}.** {section.method}{needs}")
        return "\n".join(parts) + "\n"
    parts = [_HEAD, f"## Machine\n\n{_machine(run['machine'])}\n"]
    if run["machine"]["kind"] != "cuda":
        parts.append("**A rehearsal on a CPU: no figure below is one of a GPU.**\n")
    outcomes = {given["name"]: given for given in run["outcomes"]}
    for section in sections:
        if (given := outcomes.get(section.name)) is not None:
            parts.append(_section(section, given))
    return "\n".join(parts)


def _machine(machine: Mapping[str, Any]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in machine.items())])


def _section(section: Section, given: Mapping[str, Any]) -> str:
    lines = [f"## {section.title}\n", f"{section.method}\n"]
    if given["status"] != Status.RAN:
        lines.append(f"**{given['status']}**: {given['reason']}.\n")
        return "\n".join(lines)
    what = meanings(section.function)
    single = {n: v for n, v in given["figures"].items() if not isinstance(v, list | tuple)}
    if single:
        lines += ["| | |", "|---|---|"]
        lines += [f"| {what.get(n, n)} | {shown(v)} |" for n, v in single.items()]
        lines.append("")
    for name, rows in given["figures"].items():
        if isinstance(rows, list | tuple) and rows:
            columns = list(rows[0])
            lines += [f"{_sentence(what.get(name, name))}:\n"]
            lines += ["| " + " | ".join(what.get(c, c) for c in columns) + " |"]
            lines += ["|" + "---|" * len(columns)]
            lines += ["| " + " | ".join(shown(row[c]) for c in columns) + " |" for row in rows]
            lines.append("")
    lines.append(f"It took {given['took_s']:.0f} s.\n")
    return "\n".join(lines)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def shown(value: object) -> str:
    """Return a figure with three significant digits, or as it is."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if not math.isfinite(value) or not value:
            return f"{value:g}"
        digits = max(2 - math.floor(math.log10(abs(value))), 0)
        return f"{value:,.{digits}f}" if abs(value) >= 1e-4 else f"{value:.2e}"
    return str(value)


def meanings(function: str) -> dict[str, str]:
    """Return what the fields of the dataclasses mean in the module of a section, by name."""
    found = {}
    for module in ("benchmarks.gpu.common", function.partition(":")[0]):
        spec = find_spec(module)
        assert spec is not None and spec.origin is not None, "sections are in files"
        for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
            match node:
                case ast.AnnAssign(
                    target=ast.Name(id=name),
                    value=ast.Call(func=ast.Name(id="figure"), args=[ast.Constant(value=text)]),
                ):
                    found[name] = str(text)
    return found


def summary(outcomes: Iterable[Outcome]) -> str:
    """Return a line for each section."""
    lines = []
    for one in outcomes:
        figures = one.figures or {}
        some = [f"{n}={shown(v)}" for n, v in figures.items() if not isinstance(v, list | tuple)]
        text = one.reason or ", ".join(some)
        lines.append(f"{one.name:<14}{one.status:<8}{one.took_s:>5.0f} s  {text}")
    return "\n".join(lines)
