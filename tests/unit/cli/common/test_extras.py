"""A missing package is reported with the extra that brings it; other failed imports are not."""

from importlib.metadata import PackageNotFoundError, distribution

import pytest
from click import Command, Context

from pacekeeper.cli.common import extras, lazy_group
from pacekeeper.cli.doctor.checks import Health, run_check
from pacekeeper.core.errors import ExitCode, HostError

METADATA = (
    "click>=8.1; extra == 'agent'",
    'click>=8.1; extra == "controller"',
    "no-such-package>=1; extra == 'controller'",
    "no-such-package>=1; extra == 'web'",
    "uvicorn-that-is-not>=0.30 ; extra == 'web'",
    "always-needed>=2",
)


class Installed:
    requires = METADATA


def missing(name: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize(
    ("package", "extra", "named"),
    [
        ("grpc.aio", "agent", "agent"),
        ("click", "cli", "cli"),
        ("matplotlib.figure", "cli", "plot"),
        ("starlette", "controller", "web"),
        ("torch", "cli", "trainer"),
        ("torch", "all", "all"),
    ],
)
def test_the_failure_names_package_and_extra(package: str, extra: str, named: str) -> None:
    failure = extras.missing_package(missing(package), extra=extra)
    assert failure is not None and failure.exit_code is ExitCode.HOST
    assert package.partition(".")[0] in failure.what
    assert f"'pacekeeper[{named}]'" in failure.remedy


@pytest.mark.parametrize("name", ["pacekeeper.agent.gone", "_sqlite3", ""])
def test_a_module_that_no_extra_brings_is_no_missing_package(name: str) -> None:
    assert extras.missing_package(missing(name), extra="cli") is None


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("agent", "--node", "controller"), "agent"),
        (("-h", "launch"), "trainer"),
        (("store", "backup"), "controller"),
        ((), "cli"),
    ],
)
def test_the_first_word_is_the_command(words: tuple[str, ...], extra: str) -> None:
    assert extras.extra_of(words) == extra


def test_only_commands_need_an_extra_of_their_own() -> None:
    assert set(extras._OF_COMMAND) <= set(lazy_group.command.list_commands(Context(Command(None))))


def test_what_an_extra_lacks_is_read_from_the_metadata(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def found_distribution(name: str) -> object:
        return Installed if name == "pacekeeper" else distribution(name)

    monkeypatch.setattr(extras, "distribution", found_distribution)
    found = extras.missing_by_extra()
    assert found["agent"] == ()
    assert found["controller"] == ("no-such-package",)
    assert found["web"] == ("no-such-package", "uvicorn-that-is-not")
    extras.require("agent")
    with pytest.raises(HostError, match="no-such-package"):
        extras.require("agent", "controller")


def test_without_metadata_nothing_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "distribution", gone)
    extras.require("agent")


def test_a_check_that_lacks_a_package_is_broken_and_one_that_lacks_a_module_raises() -> None:
    def look() -> str:
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401

        return ""

    check = run_check("page", look, extra="web")
    assert (check.health, check.exit_code) == (Health.BROKEN, ExitCode.HOST)
    assert "'pacekeeper[web]'" in check.remedy

    def own() -> str:
        raise missing("pacekeeper.gone")

    with pytest.raises(ModuleNotFoundError):
        run_check("page", own, extra="web")
