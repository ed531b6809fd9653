"""Measures which small faults in pure code the unit, property and golden tests find.

`python -m benchmarks.mutation_score --mutants 400 --seed 18`; about half an hour on one core; needs
`pip install coverage`. A mutant is one change in one function: a comparison, `and`/`or`, `+`/`-`,
a constant plus one, a negated condition, `return None` or a removed statement. The tests run once
with line coverage, one context per test. Then a forked process per mutant replaces the function's
code object and runs the fastest tests that cover the changed line, until one fails.

`--beside TREE` chooses only mutants that exist in another checkout as well, whatever its functions
are called and wherever they lie: functions are matched by a hash of their syntax trees without
names, strings, annotations and docstrings. Run it on both checkouts with the folders of either.
Prints one line of JSON, with the operator, place and outcome of each mutant.
"""

import argparse
import gc
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from benchmarks.mutants import Mutant, common, mutated_code, python_files

TARGETS = ("core", "controller/state", "controller/machine")
TESTS = tuple(
    f"tests/{kind}/{package}"
    for kind in ("unit", "property", "golden")
    for package in ("core", "controller")
)
MAX_MEMORY = 12 << 30  # bytes of address space of a mutant's process


class Coverage:
    """Pytest plug-in: which tests execute which lines, how long each takes and which fail."""

    def __init__(self, root: Path, targets: Sequence[str]) -> None:
        coverage = import_module("coverage")  # no dependency of pacekeeper
        self._files = [path.resolve() for path in python_files(root, targets)]
        self._measure = coverage.Coverage(
            data_file=None, config_file=False, include=[str(path) for path in self._files]
        )
        self._root = root.resolve()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.failed = set[str]()
        self._measure.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._measure.switch_context(item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.add(report.nodeid)

    def results(self, mutants: Sequence[Mutant]) -> dict[str, Any]:
        """Per mutant the tests that execute its lines, fastest first; per file its lines."""
        self._measure.stop()
        data, lines = self._measure.get_data(), {}
        for path in self._files:
            _, statements, _, missing, _ = self._measure.analysis2(str(path))
            lines[str(path.relative_to(self._root))] = (len(statements), len(missing))
        tests = []
        for mutant in mutants:
            contexts = data.contexts_by_lineno(str(mutant.path.resolve()))
            first, last = mutant.lines
            near = {name for line in range(first, last + 1) for name in contexts.get(line, ())}
            near -= self.failed | {""}
            tests.append(sorted(near, key=lambda name: (self.seconds[name], name)))
        return {
            "tests": tests,
            "lines": lines,
            "failed": sorted(self.failed),
            "run": len(self.seconds),
        }


class Forks:
    """Pytest plug-in: runs some tests for each mutant, in a forked process, not all tests once."""

    def __init__(
        self, mutants: Sequence[Mutant], tests: Sequence[Sequence[str]], options: argparse.Namespace
    ) -> None:
        self._mutants, self._options = mutants, options
        self._tests = [names[: options.most_tests] for names in tests]
        self._functions: dict[tuple[str, str, int], list[FunctionType]] = {}
        self._failed: list[str] = []
        self.unsteady: set[str] = set()  # failed in a forked process without any mutant
        self.outcomes: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and "FailedHealthCheck" not in report.longreprtext:  # too slow: no fault
            self._failed.append(report.nodeid)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for one in gc.get_objects():
            if isinstance(one, FunctionType):
                code = one.__code__
                place = (os.path.realpath(code.co_filename), code.co_qualname, code.co_firstlineno)
                self._functions.setdefault(place, []).append(one)
        gc.freeze()  # pages of the collected tests stay shared
        items = {item.nodeid: item for item in session.items}
        every = {name for names in self._tests for name in names}
        union = [item for name, item in items.items() if name in every]
        ((_, self.unsteady),) = self._run(session, [(None, union)], 1, 1800)
        work = list[tuple[Mutant | None, list[pytest.Item]]]()
        for mutant, names in zip(self._mutants, self._tests, strict=True):
            work.append((mutant, [items[name] for name in names if name not in self.unsteady]))
        results = self._run(session, work, self._options.processes, self._options.limit_s)
        self.outcomes = [outcome for outcome, _ in results]
        return True

    def _run(
        self,
        session: pytest.Session,
        work: list[tuple[Mutant | None, list[pytest.Item]]],
        processes: int,
        limit_s: int,
    ) -> list[tuple[str, set[str]]]:
        """Per mutant how it ended, and the tests that failed."""
        results: list[tuple[str, set[str]]] = [("no test", set())] * len(work)
        waiting = [number for number, (_, items) in enumerate(work) if items][::-1]
        running: dict[int, tuple[int, float, str]] = {}
        while waiting or running:
            while waiting and len(running) < processes:
                number, folder = waiting.pop(), tempfile.mkdtemp(dir="/tmp")
                sys.stdout.flush()
                if (pid := os.fork()) == 0:
                    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
                    self._child(session, *work[number], folder)
                running[pid] = (number, time.monotonic() + 10 * limit_s, folder)
            time.sleep(0.02)
            for pid, (number, deadline, folder) in list(running.items()):
                late = time.monotonic() > deadline
                if late:
                    os.killpg(pid, signal.SIGKILL)
                ended, status = os.waitpid(pid, 0 if late else os.WNOHANG)
                if ended:
                    report = Path(folder, "failed")
                    failed = set(json.loads(report.read_text())) if report.exists() else None
                    late |= os.WIFSIGNALED(status)  # processor time or memory is spent
                    outcome = "late" if late else "crashed" if failed is None else "killed"
                    results[number] = (outcome if failed != set() else "survived", failed or set())
                    shutil.rmtree(folder, ignore_errors=True)
                    del running[pid]
                    print(number, *results[number], file=sys.stderr, flush=True)
        return results

    def _child(
        self, session: pytest.Session, mutant: Mutant | None, items: list[pytest.Item], folder: str
    ) -> None:
        """Changes the function, runs the tests, writes which failed, and ends the process."""
        try:
            os.setsid()
            for number in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            tempfile.tempdir = folder
            os.environ.update(TMPDIR=folder, PYTEST_DEBUG_TEMPROOT=folder)
            resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
            if mutant is not None:
                place = (os.path.realpath(mutant.path), mutant.function, mutant.first_line)
                for function in self._functions[place]:
                    function.__code__ = mutated_code(mutant)
            # What the session shares stays: after the last item comes, as pytest sees it, another.
            other = next(one for one in session.items if one is not items[-1])
            for item, after in zip(items, [*items[1:], other], strict=True):
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                if self._failed and mutant is not None:
                    break
            Path(folder, "failed").write_text(json.dumps(self._failed))
        finally:
            os._exit(0)


def run_tests(root: Path, tests: Sequence[str], plugin: object) -> None:
    """Runs pytest in this process: the same examples of properties each time, none made smaller."""
    options = ["-q", "-s", "-p", "no:cacheprovider", "--hypothesis-profile", "whole"]
    with redirect_stdout(sys.stderr):
        pytest.main([*options, *(one for one in tests if (root / one).exists())], plugins=[plugin])


def measured(
    root: Path, targets: Sequence[str], tests: Sequence[str], mutants: Sequence[Mutant]
) -> dict[str, Any]:
    """Runs the tests with `Coverage` in a process of its own; returns its results."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    if (pid := os.fork()) == 0:
        plugin = Coverage(root, targets)
        run_tests(root, tests, plugin)
        sender.send(plugin.results(mutants))
        os._exit(0)
    sender.close()
    found: dict[str, Any] = receiver.recv()
    os.waitpid(pid, 0)
    return found


def main() -> None:
    """Command line; see the docstring of the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="not used")
    parser.add_argument("--mutants", type=int, default=400)
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--targets", nargs="+", default=TARGETS, help="folders or files to change")
    parser.add_argument("--tests", nargs="+", default=TESTS)
    parser.add_argument("--beside", type=Path, help="another checkout that has the same mutants")
    parser.add_argument("--beside-targets", nargs="+", default=TARGETS)
    parser.add_argument("--limit-s", type=int, default=60, help="processor time of one mutant")
    parser.add_argument("--most-tests", type=int, default=60, help="run for one mutant")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    root = Path.cwd()
    there = (options.beside or root, options.beside_targets if options.beside else options.targets)
    mutants = common((root, options.targets), there)
    total = len(mutants)
    mutants = random.Random(options.seed).sample(mutants, min(options.mutants, total))
    found = measured(root, options.targets, options.tests, mutants)
    forks = Forks(mutants, found["tests"], options)
    run_tests(root, options.tests, forks)
    rows = [
        [one.operator, f"{one.path.relative_to(root)}:{one.lines[0]}", one.function, outcome]
        for one, outcome in zip(mutants, forks.outcomes, strict=True)
    ]
    outcomes = Counter(forks.outcomes)
    missed = outcomes["survived"] + outcomes["no test"]
    statements, missing = (sum(column) for column in zip(*found["lines"].values(), strict=True))
    figures = {
        "possible": total,
        "mutants": len(mutants),
        "score": 1 - missed / len(mutants),
        "outcomes": outcomes,
        "tests": found["run"],
        "failed": found["failed"],
        "unsteady": sorted(forks.unsteady),
        "coverage": 1 - missing / statements,
        "lines": found["lines"],
        "rows": rows,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
