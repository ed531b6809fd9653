"""Names, units and help of all series are as Prometheus' own tool wants them."""

import shutil
import subprocess

import pytest

from pacekeeper.agent.metrics import AgentMetrics
from pacekeeper.controller.observability.metrics import ControllerMetrics
from pacekeeper.core.prometheus_text import MetricsPage
from support.series import all_families

needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="needs promtool (Debian: prometheus)"
)


def judged(page: str) -> tuple[int, str]:
    """promtool's exit code and words: 0 where it finds nothing."""
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=page, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def everything() -> str:
    """Each series once, those too that need a fault to be told."""
    page = MetricsPage()
    for family in all_families():
        page.add(family, 1.0, *family.labels)
    bare = ControllerMetrics().page() + AgentMetrics("n").page()
    lines = (line for line in bare.decode().splitlines(keepends=True))
    told = {family.name for family in all_families()}
    rest = (line for line in lines if not any(name in line.split("{")[0] for name in told))
    return page.text() + "".join(rest)


@needs_promtool
def test_all_series_are_as_conventions_have_it() -> None:
    assert judged(everything()) == (0, "")


@needs_promtool
def test_one_that_is_not_would_be_seen() -> None:
    code, said = judged("# HELP fooBar One.\n# TYPE fooBar counter\nfooBar 1\n")
    assert code != 0 and "fooBar" in said


def test_the_label_job_is_left_to_prometheus() -> None:
    reserved = {"job", "instance"}
    assert not [family.name for family in all_families() if reserved & set(family.labels)]
