"""Fuzzer of every parser that reads bytes from another process.

`make stress`, or `PYTHONPATH=tests python -m fuzz.run --minutes 10`. Each parser must accept the
input or raise its stated error: anything else, a case over CPU_S of processor time or growth over
MAX_GROWTH_BYTES counts as found. Valid seeds are mutated as bytes (`mutations.py`) and by meaning
(`structure.py`); a case that reaches new lines (`coverage.py`) or a new error is mutated further.
Each parser runs in a process of its own, so that a crash, a hang in C code or a leak is reported
with its case.

Prints a table and one line of JSON; exits with 1 if anything was found. `--minutes` is processor
time per parser. `--keep DIR` stores the cases found. `--tally FILE` adds up several runs, keeps the
useful inputs beside FILE and gives each parser, in turns of `--turn` minutes, what it lacks of
`--minutes`, parsers exposed to the network first; with `--minutes 0` it only prints the sums.
"""

import argparse
import hashlib
import json
import logging
import mmap
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from fuzz.coverage import HOME, Ways
from fuzz.mutations import MAX_CASE_BYTES, damaged
from fuzz.seeds import seeds
from fuzz.tally import Tally
from fuzz.targets import EXPOSED, Seeds, Target, targets
from support.tree import ROOT

CPU_S = 10.0
SILENT_S = 120.0  # without a new case a process counts as hung, in C code that hears no signal
MAX_GROWTH_BYTES = 2 << 30
MAX_CORPUS = 800
MAX_KEPT_BYTES = 16 << 10  # of an input that is kept
MAX_ANSWERS = 300  # beyond, words are no guide: they quote the case
MAX_FOUND = 20
# Some seeds of these are of another kind, and rightly refused.
MIXED = (
    "protocol-machine", "protocol-report", "trace-any", "service-operator", "web",
)  # fmt: skip
HEAD_BYTES = 16  # number of the case and its length, before the case itself


class SlowError(BaseException):
    """A case took too long. No parser catches it."""


class Spool:
    """The case under way, where another process can read it."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), HEAD_BYTES + MAX_CASE_BYTES)

    def put(self, number: int, case: bytes) -> None:
        """This is tried next."""
        self._memory[HEAD_BYTES : HEAD_BYTES + len(case)] = case
        self._memory[:HEAD_BYTES] = number.to_bytes(8, "little") + len(case).to_bytes(8, "little")

    def get(self) -> tuple[int, bytes]:
        """(number, case) of what was put last."""
        number = int.from_bytes(self._memory[:8], "little")
        size = int.from_bytes(self._memory[8:HEAD_BYTES], "little")
        return number, self._memory[HEAD_BYTES : HEAD_BYTES + size]


def verdict(target: Target, case: bytes) -> tuple[str, bool]:
    """(what came of a case, in words without numbers; whether that may be)."""
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        target.run(case)
        return "accepted", True
    except target.stated as error:
        return f"{type(error).__name__} {_shape(error)}", True
    except SlowError:
        return f"more than {CPU_S:g} s", False
    except MemoryError:
        return "more memory than it may have", False
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300], False
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def fuzz(
    target: Target,
    given: Seeds,
    for_s: float,
    random: Random,
    spool: Spool,
    more: Seeds = (),
    *,
    most_found: int = MAX_FOUND,
) -> Any:
    """Try damaged inputs for so much processor time; the result for the table.

    `more`: inputs that were worth keeping in earlier runs.
    """
    known, ways = set[str](), Ways()
    for seed in given:
        (words, may_be), _ = ways.run(partial(verdict, target, seed))
        if not (words == "accepted" and may_be) and target.name not in MIXED:
            raise AssertionError(f"{target.name}: a seed is {words}")
    kept = [case for case in more if ways.run(partial(verdict, target, case))[1]]
    corpus, found = [*given, *kept], list[dict[str, Any]]()
    began_s, cpu_s, number, accepted, slowest_s = time.monotonic(), time.process_time(), 0, 0, 0.0
    while time.process_time() - cpu_s < for_s and len(found) < most_found:
        case = damaged(corpus, random)
        number += 1
        spool.put(number, case)
        case_began_s = time.process_time()
        (words, may_be), is_new = ways.run(partial(verdict, target, case))
        slowest_s = max(slowest_s, time.process_time() - case_began_s)
        accepted += words == "accepted"
        if not may_be and words not in {one["what"] for one in found}:
            found.append(finding(words, case))
        is_news = words not in known and len(known) < MAX_ANSWERS
        if may_be and len(case) <= MAX_KEPT_BYTES and (is_new or is_news):
            kept.append(case)
            corpus = [*given, *kept[-MAX_CORPUS:]]
        if len(known) < 10 * MAX_ANSWERS:
            known.add(words)
    return {
        "cases": number,
        "minutes": (time.monotonic() - began_s) / 60.0,
        "cpu_minutes": (time.process_time() - cpu_s) / 60.0,
        "accepted": accepted / max(1, number),
        "answers": len(known),
        "ways": len(ways.seen),
        "files": sorted(name.removeprefix(HOME).lstrip("/") for name in ways.files),
        "slowest_s": slowest_s,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0,
        "found": found,
        "kept": kept,
    }


def finding(what: str, case: bytes) -> dict[str, Any]:
    """Something that must not be, with the case that brought it."""
    return {"what": what, "sha256": hashlib.sha256(case).hexdigest(), "case": case.hex()}


def child(name: str, for_s: float, seed: int, spool_file: Path, corpus: Path | None) -> None:
    """Fuzz one parser in this process; prints its result and keeps its inputs in `corpus`."""

    def too_slow(_number: int, _frame: object) -> None:
        raise SlowError

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)  # what is refused is said, a million times
    signal.signal(signal.SIGPROF, too_slow)
    with tempfile.TemporaryDirectory(dir=_shared_memory()) as folder:
        target = targets(Path(folder))[name]
        given = seeds()[name]
        files = sorted(corpus.iterdir()) if corpus is not None else []
        more = tuple(file.read_bytes() for file in files)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        limit = size + MAX_GROWTH_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        result = fuzz(target, given, for_s, Random(seed), Spool(spool_file), more)
        kept = {hashlib.sha256(case).hexdigest()[:16]: case for case in result.pop("kept")}
        for file in files:
            if file.name not in kept:
                file.unlink()  # it goes no way that others do not
        if corpus is not None:
            for digest, case in kept.items():
                (corpus / digest).write_bytes(case)
        print(json.dumps(result))


def watched(name: str, for_s: float, seed: int, folder: Path, corpus: Path | None = None) -> Any:
    """One parser's result, from a process that may die of it."""
    spool_file = folder / "spool"
    spool_file.write_bytes(bytes(HEAD_BYTES + MAX_CASE_BYTES))
    spool = Spool(spool_file)
    command = [sys.executable, "-m", "fuzz.run", "--child", str(spool_file)]
    command += ["--only", name, "--minutes", str(for_s / 60.0), "--seed", str(seed)]
    command += ["--corpus", str(corpus)] if corpus is not None else []
    with (folder / "said").open("w+") as said:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": "tests"},
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        at, news_s = (0, b""), time.monotonic()
        try:
            while process.poll() is None:
                time.sleep(0.2)
                if (now := spool.get()) != at:
                    at, news_s = now, time.monotonic()
                elif time.monotonic() - news_s > SILENT_S:
                    break
        finally:
            process.kill()
            code = process.wait()
        said.seek(0)
        lines = said.read().splitlines()
    if code == 0 and lines:
        return json.loads(lines[-1])
    number, case = spool.get()
    what = "a hang" if code == -signal.SIGKILL else f"the process ended with {code}: {lines[-1:]}"
    return {
        "cases": number, "minutes": 0.0, "cpu_minutes": 0.0, "accepted": 0.0, "answers": 0,
        "ways": 0, "files": [], "slowest_s": 0.0, "peak_mib": 0.0, "found": [finding(what, case)],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of each parser")
    parser.add_argument("--only", action="append", help="this parser; repeatable")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="directory for the cases found")
    parser.add_argument("--tally", type=Path, help="file with the sums of several runs")
    parser.add_argument("--turn", type=float, default=2.0, help="minutes, with --tally")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        for_s = options.minutes * 60.0
        child(options.only[0], for_s, options.seed, options.child, options.corpus)
        return
    every = seeds()
    names = options.only or [*EXPOSED, *sorted(set(every) - set(EXPOSED))]
    tally = Tally(options.tally) if options.tally is not None else None
    results: dict[str, Any] = {}
    print(f"{'parser':<24}{'CPU min':>8}{'cases':>10}{'accepted':>10}{'answers':>8}{'ways':>7}"
          f"{'slowest s':>10}{'MiB':>6}  found")  # fmt: skip
    with tempfile.TemporaryDirectory(dir=_shared_memory()) as folder:
        for name, minutes in _turns(names, options.minutes, options.turn, tally):
            corpus = tally.corpus(name) if tally is not None else None
            seed = options.seed + (tally.of(name)["runs"] if tally is not None else 0)
            one = results[name] = watched(name, minutes * 60.0, seed, Path(folder), corpus)
            if tally is not None:
                tally.add(name, one)
            print(f"{name:<24}{one['cpu_minutes']:>8.2f}{one['cases']:>10}{one['accepted']:>10.1%}"
                  f"{one['answers']:>8}{one['ways']:>7}{one['slowest_s']:>10.2f}"
                  f"{one['peak_mib']:>6.0f}  "
                  f"{'; '.join(f['what'] for f in one['found']) or 'nothing'}",
                  flush=True)  # fmt: skip
            for found in one["found"] if options.keep else ():
                options.keep.mkdir(parents=True, exist_ok=True)
                kept = options.keep / f"{name}-{found['sha256'][:12]}"
                kept.write_bytes(bytes.fromhex(found["case"]))
    summary = {
        name: {key: one[key] for key in ("cpu_minutes", "cases", "ways")}
        | {"found": [f["what"] for f in one["found"]]}
        for name, one in results.items()
    }
    if tally is not None:
        print(tally.table(names))
        summary = {name: tally.of(name) for name in names}
        for one in summary.values():
            one.pop("files")
    print(json.dumps({"seed": options.seed, "parsers": summary}))
    sys.exit(1 if any(one["found"] for one in summary.values()) else 0)


def _turns(
    names: list[str], minutes: float, turn: float, tally: Tally | None
) -> Iterator[tuple[str, float]]:
    """(parser, minutes) one after the other; with a tally until none lacks any."""
    if tally is None:
        yield from ((name, minutes) for name in names)
        return
    for name in names:
        while (lacks := minutes - tally.of(name)["cpu_minutes"]) > 0.01:
            if tally.of(name)["found"]:
                break
            yield name, min(turn, lacks)


def _shape(error: Exception) -> str:
    """An error's words without what stood in the case: as many kinds as there are checks."""
    return re.sub(r"'.*|\".*|[\d.]+", "", str(error))[:60]


def _shared_memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


if __name__ == "__main__":
    main()
