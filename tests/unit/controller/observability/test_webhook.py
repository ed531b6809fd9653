"""Deliveries are signed, repeated for a while, and never in anybody's way."""

import base64
import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.controller.observability import webhook
from pacekeeper.controller.observability.webhook import Webhook
from pacekeeper.controller.state.job_parts import Coverage
from pacekeeper.controller.state.state import JobState, State
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.metrics import WebhookConfig
from pacekeeper.core.errors import ConfigError, HostError
from pacekeeper.core.incidents.findings import Blindness
from support.alerting import Receiver, wait_for


def blind(*jobs: str) -> State:
    return State(
        jobs={job: JobState(name=job, coverage=Coverage(blind=Blindness.NOISE)) for job in jobs}
    )


class Ends:
    """What became of what was told: (taken?, how many)."""

    def __init__(self) -> None:
        self.all: list[tuple[bool, int]] = []

    def __call__(self, is_taken: bool, count: int) -> None:
        self.all.append((is_taken, count))

    def wait(self, number: int) -> list[tuple[bool, int]]:
        wait_for(f"{number} ends", lambda: len(self.all) >= number)
        return self.all


def configured(*, insecure: bool = False, **settings: Any) -> ControllerConfig:
    return ControllerConfig(
        webhook=WebhookConfig(**{"hold_ratio": 0.0, **settings}), insecure=insecure
    )


@contextmanager
def telling(ends: Ends, **settings: Any) -> Iterator[Webhook]:
    one = Webhook(configured(**settings), on_end=ends)
    try:
        yield one
    finally:
        one.close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "LONGEST_PAUSE_S", 0.01)


def secret(path: Path, text: str) -> str:
    path.write_text(text + "\n")
    path.chmod(0o600)
    return str(path)


def test_it_speaks_as_alertmanager_does() -> None:
    ends = Ends()
    with Receiver() as receiver, telling(ends, url=receiver.url) as one:
        one.on_tick(blind("a", "b"), 1.5)
        assert ends.wait(1) == [(True, 2)]
        one.on_tick(blind("b"), 60.0)
        ends.wait(2)
    first, second = (delivery.document for delivery in receiver.told)
    assert (first["version"], first["status"], len(first["alerts"])) == ("4", "firing", 2)
    alert = first["alerts"][0]
    assert alert["labels"] == {
        "alertname": "PacekeeperBlind",
        "severity": "warning",
        "job_name": "a",
        "cause": "noise",
    }
    assert first["commonLabels"] == {k: v for k, v in alert["labels"].items() if k != "job_name"}
    assert alert["annotations"]["runbook_url"] == "docs/runbooks/PacekeeperBlind.md"
    assert (alert["startsAt"], alert["endsAt"]) == (
        "1970-01-01T00:00:01.500Z",
        "0001-01-01T00:00:00Z",
    )
    assert second["status"] == "resolved"
    (over,) = second["alerts"]
    assert over["fingerprint"] == alert["fingerprint"]
    assert (over["startsAt"], over["endsAt"]) == (alert["startsAt"], "1970-01-01T00:01:00.000Z")


def test_for_slack_it_is_a_message_without_markup_of_others() -> None:
    ends = Ends()
    with Receiver() as receiver, telling(ends, url=receiver.url, format="slack") as one:
        state = State(
            jobs={
                "a": JobState(
                    name="a", coverage=Coverage(blind=Blindness.NOISE, reason="x<1 & <@all>")
                )
            }
        )
        one.on_tick(state, 0.0)
        one.on_tick(State(), 1.0)
        ends.wait(1)
        wait_for("both are told", lambda: "over" in receiver.told[-1].body.decode())
    text = "\n".join(delivery.document["text"] for delivery in receiver.told)
    assert text == (
        "*warning*: A slow rank of job a would not be detected (noise)\n"
        "> x&lt;1 &amp; &lt;@all&gt;\n"
        "*over*: A slow rank of job a would not be detected (noise)"
    )


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("plain-secret", b"plain-secret"),
        (f"whsec_{base64.b64encode(b'0123').decode()}", b"0123"),
    ],
)
def test_deliveries_are_signed_as_standard_webhooks_are(
    text: str, key: bytes, tmp_path: Path
) -> None:
    ends, path = Ends(), secret(tmp_path / "secret", text)
    with Receiver() as receiver, telling(ends, url=receiver.url, secret_file=path) as one:
        one.on_tick(blind("a"), 0.0)
        ends.wait(1)
    (delivery,) = receiver.told
    identity, stamp = delivery.headers["webhook-id"], delivery.headers["webhook-timestamp"]
    digest = hmac.new(key, f"{identity}.{stamp}.".encode() + delivery.body, hashlib.sha256).digest()
    assert delivery.headers["webhook-signature"] == f"v1,{base64.b64encode(digest).decode()}"


def test_without_a_secret_nothing_is_signed() -> None:
    ends = Ends()
    with Receiver() as receiver, telling(ends, url=receiver.url) as one:
        one.on_tick(blind("a"), 0.0)
        ends.wait(1)
    assert "webhook-signature" not in receiver.told[0].headers


def test_what_passes_is_tried_again_under_the_same_id() -> None:
    ends = Ends()
    with (
        Receiver(answer=lambda number: (500, 429, 200)[number]) as receiver,
        telling(ends, url=receiver.url) as one,
    ):
        one.on_tick(blind("a"), 0.0)
        assert ends.wait(1) == [(True, 1)]
    assert len({delivery.headers["webhook-id"] for delivery in receiver.told}) == 1
    assert len({delivery.body for delivery in receiver.told}) == 1
    assert len(receiver.told) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 301, 307])
def test_what_does_not_pass_is_lost_at_once_and_no_redirect_is_followed(status: int) -> None:
    ends = Ends()
    with (
        Receiver(answer=lambda number: status) as receiver,
        telling(ends, url=receiver.url) as one,
    ):
        one.on_tick(blind("a"), 0.0)
        assert ends.wait(1) == [(False, 1)]
        one.on_tick(blind("a", "b"), 1.0)
        ends.wait(2)
    assert len(receiver.told) == 2, "one attempt each, and none elsewhere"


def test_attempts_have_an_end_and_trouble_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ends = Ends()
    with (
        Receiver(answer=lambda number: 200 if number >= 4 else 503) as receiver,
        telling(ends, url=receiver.url, attempts=2) as one,
    ):
        for number in range(3):
            one.on_tick(blind(*"abc"[: number + 1]), 0.0)
            ends.wait(number + 1)
    assert ends.all == [(False, 1), (False, 1), (True, 1)]
    said = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert said == ["webhook=lost: it answered 503"]


def test_nobody_waits_for_a_webhook_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "MOST_WAITING", 3)
    monkeypatch.setattr(webhook, "CLOSE_S", 0.05)
    ends, begun = Ends(), threading.Event()

    def silent(*_: object) -> tuple[str, bool]:
        begun.set()
        threading.Event().wait(60)
        return "", True

    monkeypatch.setattr(Webhook, "_attempt", silent)
    with telling(ends, url="http://127.0.0.1:1/") as one:
        one.on_tick(blind("first"), 0.0)
        assert begun.wait(60)
        jobs = ["first", *(f"job-{number}" for number in range(8))]
        one.on_tick(blind(*jobs), 1.0)
        assert ends.all == [(False, 5)], "the oldest go, and are counted"
        waiting = [telling.notice.labels["job_name"] for telling in one._waiting]
        assert waiting == ["job-5", "job-6", "job-7"]
    assert one._thread.daemon, "nor does the end of the controller wait"


def test_files_are_read_anew_at_each_delivery(tmp_path: Path) -> None:
    ends = Ends()
    with Receiver() as first, Receiver() as second:
        path = secret(tmp_path / "url", first.url)
        with telling(ends, url_file=path) as one:
            one.on_tick(blind("a"), 0.0)
            ends.wait(1)
            secret(tmp_path / "url", second.url)
            one.on_tick(blind("a", "b"), 0.0)
            ends.wait(2)
        assert (len(first.told), len(second.told)) == (1, 1)


def test_the_url_is_never_said(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    ends, path = Ends(), secret(tmp_path / "url", "http://127.0.0.1:1/T0/very-secret")
    with telling(ends, url_file=path, attempts=1) as one:
        one.on_tick(blind("a"), 0.0)
        assert ends.wait(1) == [(False, 1)]
    assert "webhook=lost: URLError" in caplog.text and "very-secret" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"url": "http://hooks.example/x"}, "not encrypted; name one with https"),
        ({"url": "http://192.0.2.1/x"}, "not encrypted"),
        ({"url": "ftp://127.0.0.1/x"}, "expected http"),
        ({"url": "https://"}, "expected http"),
        ({"url": "http://127.0.0.1:x/"}, "no URL"),
        ({"url": "http://127.0.0.1/", "ca": "none.crt"}, "ca none.crt"),
        ({"url_file": "none"}, "none: No such file"),
        ({"url": "http://127.0.0.1/", "secret_file": "none"}, "none: No such file"),
    ],
)
def test_what_can_not_be_told_is_refused_at_the_start(settings: dict[str, Any], key: str) -> None:
    with pytest.raises((ConfigError, HostError), match=key):
        Webhook(configured(**settings), on_end=Ends())


def test_in_the_clear_only_where_that_was_asked_for() -> None:
    config = configured(url="http://hooks.example/x", insecure=True)
    Webhook(config, on_end=Ends()).close()


def test_without_a_url_there_is_nobody_to_tell() -> None:
    ends = Ends()
    with telling(ends) as one:
        one.on_tick(blind("a"), 0.0)
        assert not one._thread.is_alive() and not one._waiting
    assert ends.all == []


def test_a_mistake_of_ours_is_said_and_counted_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ends = Ends()

    def failing(*_: object) -> None:
        raise KeyError("a bug")

    with Receiver() as receiver, telling(ends, url=receiver.url) as one:
        with monkeypatch.context() as broken:
            broken.setattr(webhook, "update_alerts", failing)
            one.on_tick(blind("a"), 0.0)
        assert ends.all == [(False, 1)] and "a bug" in caplog.text
        with monkeypatch.context() as broken:
            broken.setattr(Webhook, "_deliver", failing)
            one.on_tick(blind("a"), 0.0)
            assert ends.wait(2)[1] == (False, 1)
        one.on_tick(blind("a", "b"), 0.0)
        assert ends.wait(3)[2] == (True, 1)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"url": "a", "url_file": "b"}, "url, url_file"),
        ({"format": "xml"}, "format"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"attempts": 0}, "attempts"),
        ({"hold_ratio": -1.0}, "hold_ratio"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        WebhookConfig(**settings)


def test_a_delivery_is_json() -> None:
    assert json.loads(json.dumps(webhook._BODIES["slack"]([]))) == {"text": ""}
