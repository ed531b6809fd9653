"""The real Prometheus and Alertmanager on loopback, and a webhook that keeps what it is told."""

import json
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

from support.ports import free_port

RULES = Path(__file__).resolve().parents[2] / "deploy" / "pacekeeper.alerts.yml"
PROGRAMS = ("prometheus", "prometheus-alertmanager")
MISSING = [name for name in PROGRAMS if not shutil.which(name)]
PATIENCE_S = 120.0  # for a broken world only


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """How long everything waits; each alert waits `hold_s` instead of what its rule says."""

    scrape_s: float = 1.0
    evaluate_s: float = 1.0
    hold_s: float = 1.0
    group_wait_s: float = 0.5
    group_interval_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What a webhook was told, and when."""

    unix_s: float
    headers: Mapping[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        """Its JSON."""
        return json.loads(self.body)


@dataclass(kw_only=True)
class Receiver:
    """A webhook. `answer`: status by number of the request; use as a context manager."""

    answer: Callable[[int], int] = lambda number: 200
    delay_s: float = 0.0
    told: list[Delivery] = field(default_factory=list)

    def __enter__(self) -> "Receiver":
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                told = Delivery(unix_s=time.time(), headers=headers, body=body)
                status = receiver.answer(len(receiver.told))
                receiver.told.append(told)
                time.sleep(receiver.delay_s)
                self.send_response(status)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/hook"

    def alerts(self, name: str, status: str) -> list[tuple[float, dict[str, Any]]]:
        """(when, alert) of each that was told by this name, in this state."""
        return [
            (delivery.unix_s, alert)
            for delivery in list(self.told)
            for alert in delivery.document["alerts"]
            if alert["labels"]["alertname"] == name and alert["status"] == status
        ]


class Stack:
    """Prometheus, its rules scaled down, and Alertmanager, which tells `webhook`."""

    def __init__(
        self,
        folder: Path,
        targets: Mapping[str, str],
        webhook: str,
        intervals: Intervals,
        scrape: Mapping[str, Any] | None = None,
    ) -> None:
        """`targets`: HOST:PORT by name of the scrape job; `scrape`: more settings of each."""
        self._folder = folder
        folder.mkdir(parents=True)
        prometheus, alertmanager = free_port(), free_port()
        self.prometheus = f"http://127.0.0.1:{prometheus}"
        self.alertmanager = f"http://127.0.0.1:{alertmanager}"
        rules = re.sub(r"( for: )\S+", rf"\g<1>{_ms(intervals.hold_s)}", RULES.read_text())
        (folder / "rules.yml").write_text(rules)
        jobs = [
            {"job_name": name, "static_configs": [{"targets": [target]}], **(scrape or {})}
            for name, target in targets.items()
        ]
        config = {
            "global": {
                "scrape_interval": _ms(intervals.scrape_s),
                "scrape_timeout": _ms(intervals.scrape_s),
                "evaluation_interval": _ms(intervals.evaluate_s),
            },
            "rule_files": ["rules.yml"],
            "scrape_configs": jobs,
            "alerting": {
                "alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{alertmanager}"]}]}]
            },
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # which is YAML, too
        route = {
            "receiver": "people",
            "group_by": ["..."],
            "group_wait": _ms(intervals.group_wait_s),
            "group_interval": _ms(intervals.group_interval_s),
        }
        receivers = [{"name": "people", "webhook_configs": [{"url": webhook}]}]
        document = {"route": route, "receivers": receivers}
        (folder / "alertmanager.yml").write_text(json.dumps(document))
        self._processes = [
            self._start(
                "prometheus-alertmanager",
                f"--config.file={folder / 'alertmanager.yml'}",
                f"--storage.path={folder / 'alertmanager'}",
                f"--web.listen-address=127.0.0.1:{alertmanager}",
                "--cluster.listen-address=",
            ),
            self._start(
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'prometheus'}",
                f"--web.listen-address=127.0.0.1:{prometheus}",
            ),
        ]
        urls = [f"{url}/-/ready" for url in (self.prometheus, self.alertmanager)]
        wait_for("both are ready", lambda: all(map(_answers, urls)))

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The result of an instant query. Raises HTTPError for an expression that is none."""
        question = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.prometheus}/api/v1/query?{question}") as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found

    def first_unix_s(self, selector: str) -> float | None:
        """When the first sample of these series came that the last minutes have."""
        found = self.query(f"{selector}[5m]")
        return min((float(unix_s) for one in found for unix_s, _ in one["values"]), default=None)

    def alerts_of_alertmanager(self) -> list[dict[str, Any]]:
        """All that Alertmanager has."""
        with urllib.request.urlopen(f"{self.alertmanager}/api/v2/alerts") as answer:
            found: list[dict[str, Any]] = json.load(answer)
        return found

    def close(self) -> None:
        """Nothing of it runs any more."""
        for process in self._processes:
            process.kill()
            process.wait()

    def __enter__(self) -> "Stack":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("w") as log:
            command = [name, "--log.level=warn", *options]
            return subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder)


def wait_for(what: str, holds: Callable[[], Any]) -> Any:
    """Wait for the world and return the first true answer."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not (answer := holds()):
        assert time.monotonic() < give_up_s, f"never: {what}"
        time.sleep(0.02)
    return answer


def _ms(interval_s: float) -> str:
    return f"{round(interval_s * 1e3)}ms"


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False
