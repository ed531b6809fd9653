"""Environments in which the built wheel is installed with the packages of some extras.

No network: the wheel is built by the build backend itself and installed by pip without its
dependencies. Those are linked from the environment of the tests, exactly as far as the metadata of
the installed wheel asks for them; a package that an extra forgets is missing there.
"""

import os
import subprocess
import sys
import venv
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.tree import ROOT

TIMEOUT_S = 120.0


def build(target: str, out: Path, *, source: Path = ROOT) -> Path:
    """Build `target` ("wheel" or "sdist") of the project in `source` into the folder `out`."""
    subprocess.run(
        [sys.executable, "-Im", "hatchling", "build", "-t", target, "-d", str(out)],
        cwd=source,
        check=True,
        capture_output=True,
        text=True,
    )
    (built,) = out.iterdir()
    return built


class WheelEnvironment:
    """A virtual environment with the wheel, and of its dependencies those of some extras only."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False)
        self.folder = folder
        self.bin = folder / "bin"
        self.python = self.bin / "python"
        (self.packages,) = folder.glob("lib/python*/site-packages")
        self.dependencies: set[str] = set()

    @classmethod
    def base(cls, folder: Path, wheel: Path) -> "WheelEnvironment":
        """Install the wheel by pip, without an extra."""
        made = cls(folder)
        subprocess.run(
            [sys.executable, "-Im", "pip", "--python", str(made.python), "install"]
            + ["--quiet", "--no-index", "--no-deps", "--no-compile", str(wheel)],
            check=True,
            capture_output=True,
            text=True,
        )
        made.dependencies = closure(made.distribution())
        return made

    def with_extras(
        self, folder: Path, *extras: str, beside: Iterable[str] = ()
    ) -> "WheelEnvironment":
        """A further environment with the same installed files and the packages of `extras`.

        `beside`: distributions that the user has there anyway.
        """
        made = WheelEnvironment(folder)
        _link(self.distribution(), made.packages)
        script = (self.bin / "pacekeeper").read_text()
        (made.bin / "pacekeeper").write_text(script.replace(str(self.bin), str(made.bin), 1))
        (made.bin / "pacekeeper").chmod(0o755)
        made.dependencies = closure(made.distribution(), extras)
        for name in made.dependencies.union(*(closure(distribution(n)) | {n} for n in beside)):
            _link(distribution(name), made.packages)
        return made

    def distribution(self) -> Distribution:
        """The installed pacekeeper."""
        (ours,) = distributions(name="pacekeeper", path=[str(self.packages)])
        return ours

    def pacekeeper(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the installed console script to its end, in the environment's folder."""
        return self._run(str(self.bin / "pacekeeper"), *arguments)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the environment's Python to its end."""
        return self._run(str(self.python), "-I", *arguments)

    def _run(self, *line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            line,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )


def closure(root: Distribution, extras: Iterable[str] = ()) -> set[str]:
    """Normalised names of all distributions that `root` with `extras` needs, without itself."""
    own = canonicalize_name(root.name)
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    todo = [(own, extra) for extra in ("", *extras)]
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        found.add(name)
        for line in (root if name == own else distribution(name)).requires or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                todo += [(canonicalize_name(needed.name), each) for each in ("", *needed.extras)]
    return found - {own}


def _link(found: Distribution, packages: Path) -> None:
    """Make the files of a distribution importable from the folder `packages`."""
    for top in sorted({file.parts[0] for file in found.files or () if file.parts[0] != ".."}):
        source = Path(str(found.locate_file(top)))
        if top == "__pycache__":
            continue
        if not source.is_dir() or source.suffix or (source / "__init__.py").exists():
            (packages / top).symlink_to(source)
            continue
        # A namespace, to which several distributions may add: google, mpl_toolkits.
        (packages / top).mkdir(exist_ok=True)
        for below in {file.parts[1] for file in found.files or () if file.parts[0] == top}:
            if below != "__pycache__":
                (packages / top / below).symlink_to(source / below)
