"""The page of a real controller, over TLS, and as a real browser draws it."""

import json
import os
import shutil
import ssl
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from pacekeeper.cli.admin.ca import Kind
from pacekeeper.core.errors import ExitCode
from pacekeeper.core.telemetry.node_report import JobReport
from support.authorities import Authority
from support.browsers import Browser
from support.commands import pacekeeper
from support.controllers import (
    ControllerProcess,
    ScriptedAgent,
    attached,
    first_layout,
    step_records,
    until,
)

JOB = "train"
LAYOUT = first_layout()
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def url_of(controller: ControllerProcess) -> str:
    """As the log says it."""
    until("the page is served", lambda: " web=" in controller.log)
    return controller.log.split(" web=", 1)[1].split()[0]


def trained(controller: ControllerProcess) -> None:
    """Rank 2 is slow after a while."""
    agent = ScriptedAgent(controller.address)
    agent.report_and_wait(attached(JOB, LAYOUT))
    for number in range(38):
        records = step_records(number, LAYOUT, {2: 1.8} if number >= 30 else None)
        agent.report(JobReport(job=JOB, records=records))
    agent.report_and_wait()
    agent.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a controller on loopback, with an incident."""
    folder = tmp_path_factory.mktemp("web")
    with ControllerProcess(folder, "--web", "127.0.0.1:0") as controller:
        trained(controller)
        yield url_of(controller)
        assert controller.stop() == 0, "the page holds nobody up"


def drawn(url: str) -> str:
    """The page as the browser has it when its scripts are done."""
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        done = subprocess.run(
            [
                CHROMIUM,
                *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *(f"--user-data-dir={profile}", "--virtual-time-budget=5000", "--dump-dom", url),
            ],
            capture_output=True,
            text=True,
            timeout=120.0,
            env={**os.environ, "TMPDIR": profile},  # it leaves some behind
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_browser_draws_the_heat_map_and_the_course_of_an_incident(page: str) -> None:
    fleet = drawn(page)
    assert 'data-drawn="4"' in fleet, "a cell for each rank"
    assert "4 ranks on 1 node, 1 slow" in fleet and "no answer" not in fleet
    incident = drawn(f"{page}incidents/1")
    assert incident.count('class="uplot') == 2 and 'data-drawn="38"' in incident
    layout = drawn(f"{page}jobs/{JOB}/layout")
    assert 'data-drawn="4"' in layout and "stage 0: layers 0 to 1" in layout


def test_a_browser_shows_nodes_by_their_past_and_keeps_the_keyboard_s_place(page: str) -> None:
    """The part with the table is renewed every two seconds; who has tabbed to a button stays."""
    browser = Browser()
    try:
        browser.go(f"{page}strikes")
        assert "1 with a slow device" in browser.says("return document.body.innerText")
        browser.says("document.querySelector('td button').focus(); window.renewed = 0")
        browser.says("document.addEventListener('htmx:afterRequest', () => window.renewed++)")
        browser.says("document.querySelector('section').told = 'another text'")
        until("the part was renewed", lambda: browser.says("return window.renewed") > 0)
        assert browser.says("return document.activeElement.textContent.trim()") == "Cordon"
        moments = "return document.querySelector('time.moment').title.endsWith('UTC')"
        browser.go(f"{page}incidents/1")
        assert browser.says(moments), "written in the reader's zone, with UTC beside it"
    finally:
        browser.close()


def test_a_page_whose_controller_is_gone_says_so(tmp_path: Path) -> None:
    """Also one that only has parts which are renewed: an old list must not pass for a new one."""
    browser = Browser()
    try:
        with ControllerProcess(tmp_path, "--web", "127.0.0.1:0") as controller:
            browser.go(f"{url_of(controller)}incidents")
            assert browser.says("return document.getElementById('connection').hidden")
            assert controller.stop() == 0
            until("it is said", lambda: browser.says("return document.body.matches('.stale')"))
        told = browser.says("return document.getElementById('connection').innerText")
        assert "what is shown here is from before" in told and "can not be reached" in told
    finally:
        browser.close()


CALLER = "return (document.querySelector('.caller')?.textContent ?? '')"


def token_of(tokens: Path, role: str) -> str:
    made = pacekeeper("tokens", "add", "--file", str(tokens), role, f"{role}-ann")
    return next(word for word in made.stdout.split() if word.startswith("pk1."))


def test_a_person_logs_in_with_a_browser_and_acts_by_role(tmp_path: Path) -> None:
    """A browser says of each form where it comes from, and our own headers must let it."""
    tokens, config = tmp_path / "tokens", tmp_path / "pacekeeper.toml"
    shown = {role: token_of(tokens, role) for role in ("viewer", "operator")}
    config.write_text(f'[access]\ntokens = "{tokens}"\n')
    browser = Browser()
    try:
        with ControllerProcess(
            tmp_path, "--config", str(config), "--web", "127.0.0.1:0"
        ) as controller:
            url = url_of(controller)
            for role, token in shown.items():
                browser.go(f"{url}login")
                browser.submit(token)
                until("logged in", partial(browser.says, f"{CALLER}.startsWith('{role}/')"))
                browser.go(url)
                buttons = "return document.querySelectorAll('[hx-post]').length"
                assert browser.says(buttons) == (role == "operator")
            asked = browser.answer("[hx-post]", "fan \u98ce, ticket 4711")
            assert asked.endswith("Why? (It is shown to others.)")
            said = "return document.getElementById('said').textContent"
            until("it is done", lambda: "dry_run" in browser.says(said))
        audit = (tmp_path / "store.sqlite.audit.jsonl").read_text()
        (act,) = [line for line in map(json.loads, audit.splitlines()) if line["action"] == "act"]
        assert "reason=fan \u98ce, ticket 4711" in act["about"]
    finally:
        browser.close()


def test_the_data_are_those_of_the_commands(page: str) -> None:
    told = json.loads(urllib.request.urlopen(f"{page}data/fleet", timeout=60.0).read())
    (job,) = told["jobs"]
    assert job["name"] == JOB and job["slowdown"][2] == pytest.approx(1.8, abs=0.1)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--web", "0.0.0.0:0"), "--web 0.0.0.0:0 is beyond loopback, and there is no certificate"),
        (("--web", "nonsense"), "web: expected HOST:PORT"),
    ],
)
def test_beyond_loopback_nothing_is_shown_in_the_clear(
    tmp_path: Path, arguments: tuple[str, ...], why: str
) -> None:
    store = str(tmp_path / "store.sqlite")
    done = pacekeeper("controller", "--api-listen", "127.0.0.1:0", "--store", store, *arguments)
    assert done.returncode == ExitCode.CONFIG and why in done.stderr


def test_over_tls_a_token_opens_it_and_the_certificate_may_be_renewed(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    config = tmp_path / "pacekeeper.toml"
    tokens = tmp_path / "tokens"
    made = pacekeeper("tokens", "add", "--file", str(tokens), "viewer", "ann")
    token = next(word for word in made.stdout.split() if word.startswith("pk1."))
    cert, newer = (
        authority.cert(Kind.CONTROLLER, name, hosts=("127.0.0.1",)) for name in ("one", "two")
    )
    key = cert.with_suffix(".key")
    config.write_text(f'[tls]\ncert = "{cert}"\nkey = "{key}"\n[access]\ntokens = "{tokens}"\n')
    with ControllerProcess(tmp_path, "--config", str(config), "--web", "127.0.0.1:0") as controller:
        url = url_of(controller)
        assert url.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=str(authority.ca))

        def asked(shown: str) -> int:
            request = urllib.request.Request(f"{url}data/fleet")
            request.add_header("authorization", f"Bearer {shown}")
            try:
                with urllib.request.urlopen(request, timeout=60.0, context=trusted) as answer:
                    return int(answer.status)
            except urllib.error.HTTPError as error:
                return error.code

        assert (asked(token), asked("pk1.nope")) == (200, 401)
        shutil.copy(newer.with_suffix(".key"), key)
        shutil.copy(newer, cert)
        until(
            "the new certificate is read", lambda: asked(token) and "read again" in controller.log
        )
        assert asked(token) == 200
