"""Sends alerts to a webhook from its own thread.

The queue is bounded (the oldest notification is dropped), attempts have a time limit and a maximum
number, and lost notifications are counted. A delivery may arrive twice, after a restart or a lost
answer: it has an id, and each alert a fingerprint.
"""

import base64
import binascii
import hashlib
import hmac
import json
import logging
import ssl
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from pacekeeper.controller.observability.alerts import (
    AlertNotification,
    Key,
    PendingAlert,
    update_alerts,
)
from pacekeeper.controller.state.state import State
from pacekeeper.core.addresses import is_loopback
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.metrics import WebhookConfig
from pacekeeper.core.errors import ConfigError, PacekeeperError
from pacekeeper.protos import tls
from pacekeeper.protos.tls import NoRedirect

MOST_WAITING = 1024
AT_ONCE = 50  # in one delivery
LONGEST_PAUSE_S = 30.0
CLOSE_S = 2.0  # for what waits when the controller ends
_PASSING = {408, 425, 429}  # of 4xx: worth another attempt
_log = logging.getLogger(__name__)


class Webhook:
    """The webhook of one controller."""

    def __init__(self, config: ControllerConfig, *, on_end: Callable[[bool, int], None]) -> None:
        """Check URL and files, and start the thread if a webhook is configured.

        Args:
            config: The controller's configuration.
            on_end: Called with (accepted, number of notifications), from the webhook's thread.

        Raises:
            ConfigError: The URL, the secret or the authority is not usable.
            HostError: A file cannot be read.
        """
        self._config, self._insecure, self._on_end = config.webhook, config.insecure, on_end
        self._standing: Mapping[Key, PendingAlert] = {}
        self._waiting: deque[AlertNotification] = deque()
        self._changed = threading.Condition()
        self._is_closing = threading.Event()
        self._said = ""
        self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)
        if self._config.is_on:
            self._url(), self._secret()
            self._opener = _opener(self._config)
            self._thread.start()

    def on_tick(self, state: State, now_s: float) -> None:
        """Queue the notifications that the newest state requires; never blocks."""
        if not self._config.is_on:
            return
        try:
            ratio = self._config.hold_ratio
            self._standing, told = update_alerts(self._standing, state, now_s, ratio)
        except Exception:  # a mistake of ours: the controller has more to do than this
            _log.exception("webhook: the alerts could not be computed")
            self._on_end(False, 1)
            return
        if not told:
            return
        with self._changed:
            self._waiting.extend(told)
            over = len(self._waiting) - MOST_WAITING
            for _ in range(over):
                self._waiting.popleft()
            self._changed.notify()
        if over > 0:
            self._on_end(False, over)

    def close(self) -> None:
        """Try once to send what is queued, then stop."""
        self._is_closing.set()
        with self._changed:
            self._changed.notify()
        if self._config.is_on:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._is_closing.is_set():
                    self._changed.wait()
                if not self._waiting:
                    return
                count = min(AT_ONCE, len(self._waiting))
                tellings = [self._waiting.popleft() for _ in range(count)]
            try:
                is_taken = self._deliver(tellings)
            except Exception:  # a mistake of ours: the next ones are still told
                _log.exception("webhook: %d notifications were not sent", count)
                is_taken = False
            self._on_end(is_taken, count)

    def _deliver(self, tellings: Sequence[AlertNotification]) -> bool:
        """Send one delivery in up to `attempts` attempts; whether it was accepted."""
        body = json.dumps(_BODIES[self._config.format](tellings)).encode()
        identity = f"msg_{uuid.uuid4().hex}"
        for attempt in range(self._config.attempts):
            if attempt and self._is_closing.wait(min(2.0 ** (attempt - 1), LONGEST_PAUSE_S)):
                break
            trouble, is_final = self._attempt(identity, body)
            if not trouble:
                self._say("")
                return True
            if is_final:
                break
        self._say(trouble)
        return False

    def _attempt(self, identity: str, body: bytes) -> tuple[str, bool]:
        """Send once: the error (empty: accepted), and whether a retry is useless."""
        try:
            headers = {"Content-Type": "application/json", "User-Agent": "pacekeeper"}
            headers |= signature_headers(self._secret(), identity, int(time.time()), body)
            request = urllib.request.Request(self._url(), data=body, headers=headers)
            with self._opener.open(request, timeout=self._config.timeout_s):
                return "", True
        except urllib.error.HTTPError as error:
            error.close()
            is_final = error.code < 500 and error.code not in _PASSING
            return f"it answered {error.code}", is_final
        except PacekeeperError as error:
            return str(error), False
        except Exception as error:  # of the other side: no HTTP, no TLS, nobody there
            reason = getattr(error, "reason", None) or error
            return f"{type(error).__name__}: {reason}", False

    def _say(self, trouble: str) -> None:
        """Log a change between success and failure; never the URL, which may be secret."""
        if trouble and trouble != self._said:
            _log.error("webhook=lost: %s", trouble)
        elif self._said and not trouble:
            _log.info("webhook=accepts deliveries again")
        self._said = trouble

    def _url(self) -> str:
        config = self._config
        url = config.url or tls.read_token(config.url_file)
        where = "url" if config.url else config.url_file
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise ConfigError(f"[webhook] {where}: no URL") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"[webhook] {where}: expected http://... or https://...")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        is_open = parts.scheme == "http" and not is_loopback(f"{host}:{port or 80}")
        if is_open and not self._insecure:
            raise ConfigError(
                f"[webhook] {where} is beyond loopback and not encrypted",
                remedy="name one with https, or say --insecure",
            )
        return url

    def _secret(self) -> bytes:
        text = tls.read_token(self._config.secret_file)
        if not text.startswith("whsec_"):
            return text.encode()
        try:
            return base64.b64decode(text.removeprefix("whsec_"), validate=True)
        except binascii.Error:
            raise ConfigError(f"{self._config.secret_file}: whsec_ and no base64") from None


def signature_headers(secret: bytes, identity: str, unix_s: int, body: bytes) -> dict[str, str]:
    """The headers of Standard Webhooks; unsigned without a secret."""
    headers = {"webhook-id": identity, "webhook-timestamp": str(unix_s)}
    if secret:
        content = f"{identity}.{unix_s}.".encode() + body
        digest = hmac.new(secret, content, hashlib.sha256).digest()
        headers["webhook-signature"] = f"v1,{base64.b64encode(digest).decode()}"
    return headers


def _alertmanager(tellings: Sequence[AlertNotification]) -> dict[str, Any]:
    """The body of Alertmanager's webhook, version 4."""
    alerts = [_alert(telling) for telling in tellings]
    is_firing = any(alert["status"] == "firing" for alert in alerts)
    shared = set.intersection(*(set(alert["labels"].items()) for alert in alerts))
    return {
        "version": "4",
        "groupKey": "pacekeeper",
        "truncatedAlerts": 0,
        "status": "firing" if is_firing else "resolved",
        "receiver": "pacekeeper",
        "groupLabels": {},
        "commonLabels": dict(sorted(shared)),
        "commonAnnotations": {},
        "externalURL": "",
        "alerts": alerts,
    }


def _alert(telling: AlertNotification) -> dict[str, Any]:
    notice = telling.notice
    labels = {"alertname": notice.alert, "severity": notice.severity, **notice.labels}
    ended_s = telling.ended_unix_s
    return {
        "status": "firing" if ended_s is None else "resolved",
        "labels": labels,
        "annotations": {
            "summary": notice.summary,
            "description": notice.description,
            "runbook_url": f"docs/runbooks/{notice.alert}.md",
        },
        "startsAt": _rfc3339(telling.began_unix_s),
        "endsAt": "0001-01-01T00:00:00Z" if ended_s is None else _rfc3339(ended_s),
        "generatorURL": "",
        "fingerprint": hashlib.sha256(repr(notice.key).encode()).hexdigest()[:16],
    }


def _slack(tellings: Sequence[AlertNotification]) -> dict[str, Any]:
    """The body of Slack's incoming webhooks and compatible ones."""
    lines = []
    for telling in tellings:
        notice = telling.notice
        state = "over" if telling.ended_unix_s is not None else notice.severity
        line = f"*{state}*: {_plain(notice.summary)}"
        if telling.ended_unix_s is None and notice.description:
            line += f"\n> {_plain(notice.description)}"
        lines.append(line)
    return {"text": "\n".join(lines)}


def _plain(text: str) -> str:
    """Escape Slack's markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


_BODIES = {"alertmanager": _alertmanager, "slack": _slack}


def _rfc3339(unix_s: float) -> str:
    stamp = datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")
    return stamp.replace("+00:00", "Z")


def _opener(config: WebhookConfig) -> urllib.request.OpenerDirector:
    try:
        context = ssl.create_default_context(cafile=config.ca or None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"[webhook] ca {config.ca}: {error}") from None
    proxies = {"http": config.proxy, "https": config.proxy} if config.proxy else {}
    return urllib.request.build_opener(
        urllib.request.ProxyHandler(proxies),
        urllib.request.HTTPSHandler(context=context),
        NoRedirect(),
    )
