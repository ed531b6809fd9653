"""Who asks for metrics is answered if he may be, and who only connects holds up nobody."""

import contextlib
import http.client
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pacekeeper.cli.admin.ca import Kind
from pacekeeper.core.config.metrics import MetricsConfig, open_metrics
from pacekeeper.core.errors import ConfigError, HostError
from pacekeeper.core.prometheus_text import CONTENT_TYPE
from pacekeeper.protos import metrics_http
from pacekeeper.protos.metrics_http import MetricsServer
from support.authorities import Authority

PAGE = b"one 1.0\n"


@contextmanager
def serving(config: MetricsConfig | None = None) -> Iterator[MetricsServer]:
    server = MetricsServer(
        "127.0.0.1", 0, render=lambda: PAGE, config=config or MetricsConfig(), rival="another"
    )
    try:
        yield server
    finally:
        server.close()


def ask(
    server: MetricsServer,
    *,
    token: str = "",
    path: str = "/metrics",
    context: ssl.SSLContext | None = None,
) -> tuple[int, bytes]:
    """Status and body."""
    scheme = "https" if context else "http"
    request = urllib.request.Request(f"{scheme}://127.0.0.1:{server.server_port}{path}")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=60, context=context) as answer:
            assert answer.headers["Content-Type"] == CONTENT_TYPE
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def token_file(path: Path, token: str) -> str:
    path.write_text(token + "\n")
    path.chmod(0o600)
    return str(path)


def test_the_page_is_at_its_path_and_nowhere_else() -> None:
    with serving() as server:
        assert ask(server) == (200, PAGE)
        assert ask(server, path="/metrics?x=1") == (200, PAGE)
        assert ask(server, path="/") == (404, b"")
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        connection.request("HEAD", "/metrics")
        answer = connection.getresponse()
        assert (answer.status, answer.headers["Content-Length"]) == (200, str(len(PAGE)))
        connection.request("POST", "/metrics", body=b"x")
        assert connection.getresponse().status == 501


def test_only_who_shows_the_token_of_now_is_answered(tmp_path: Path) -> None:
    path = token_file(tmp_path / "token", "first")
    with serving(MetricsConfig(token_file=path)) as server:
        assert ask(server)[0] == 401
        assert ask(server, token="wrong")[0] == 401
        assert ask(server, token="first") == (200, PAGE)
        token_file(tmp_path / "token", "second")
        assert ask(server, token="first")[0] == 401
        assert ask(server, token="second") == (200, PAGE)
        (tmp_path / "token").unlink()
        assert ask(server, token="second")[0] == 401, "nobody, rather than everybody"


def test_over_tls_who_asks_may_need_a_certificate_too(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    cert = authority.cert(Kind.METRICS, "gpu-7", hosts=("127.0.0.1",))
    viewer = authority.cert(Kind.VIEWER, "prometheus")
    stranger = Authority(tmp_path / "other").cert(Kind.VIEWER, "prometheus")
    files = {"cert": str(cert), "key": str(cert.with_suffix(".key"))}
    plain = ssl.create_default_context(cafile=str(authority.ca))
    with serving(MetricsConfig(**files)) as server:
        assert ask(server, context=plain) == (200, PAGE)
        with pytest.raises(OSError):
            ask(server)  # in the clear
    with serving(MetricsConfig(**files, ca=str(authority.ca))) as server:
        for context, is_known in ((plain, False), (stranger, False), (viewer, True)):
            if isinstance(context, Path):
                shown = ssl.create_default_context(cafile=str(authority.ca))
                shown.load_cert_chain(context, context.with_suffix(".key"))
            else:
                shown = context
            if is_known:
                assert ask(server, context=shown) == (200, PAGE)
            else:
                with pytest.raises(OSError):
                    ask(server, context=shown)


def test_a_new_certificate_counts_from_the_next_connection_on(tmp_path: Path) -> None:
    first, second = Authority(tmp_path / "one"), Authority(tmp_path / "two")
    old = first.cert(Kind.METRICS, "gpu-7", hosts=("127.0.0.1",))
    new = second.cert(Kind.METRICS, "gpu-7", hosts=("127.0.0.1",))
    believes_new = ssl.create_default_context(cafile=str(second.ca))
    with serving(MetricsConfig(cert=str(old), key=str(old.with_suffix(".key")))) as server:
        with pytest.raises(OSError, match="certificate verify failed"):
            ask(server, context=believes_new)
        old.write_bytes(b"no certificate")
        assert ask(server, context=ssl.create_default_context(cafile=str(first.ca)))[0] == 200
        new.with_suffix(".key").replace(old.with_suffix(".key"))
        new.replace(old)
        assert ask(server, context=believes_new) == (200, PAGE)


def test_who_connects_and_says_nothing_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_http, "TIMEOUT_S", 1.0)
    with serving() as server:
        silent = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(4)]
        assert ask(server) == (200, PAGE)
        for one in silent:
            one.settimeout(60)
            assert one.recv(1) == b"", "they are let go"


def test_more_than_a_few_at_once_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_http, "AT_ONCE", 1)
    monkeypatch.setattr(metrics_http, "TURN_OUT_S", 0.05)
    with serving() as server:
        asked, answered = threading.Event(), threading.Event()

        def render() -> bytes:
            asked.set()
            assert answered.wait(60.0)
            return PAGE

        server.render = render
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as first:
            first.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert asked.wait(60.0)
            with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as second:
                assert second.recv(1) == b""
            answered.set()
            assert first.recv(1) != b""


@pytest.mark.parametrize("said", [b"", b"GET /metrics HTTP/1.0\r\nx: "])
def test_those_who_never_finish_asking_are_turned_out_for_those_who_ask(said: bytes) -> None:
    """Eight of them kept Prometheus out for as long as they liked."""
    with serving() as server:
        slow = [
            socket.create_connection(("127.0.0.1", server.server_port), timeout=60)
            for _ in range(2 * metrics_http.AT_ONCE)
        ]
        for one in slow:
            with contextlib.suppress(OSError):
                one.sendall(said)
        for _ in range(3):
            assert ask(server) == (200, PAGE)
        for one in slow:
            one.close()


def test_who_was_answered_makes_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_http, "AT_ONCE", 1)
    with serving() as server:
        for _ in range(3):
            assert ask(server) == (200, PAGE)
            with server._free:  # given back a moment after the answer
                pass


def test_files_of_no_use_are_refused_at_once(tmp_path: Path) -> None:
    for config, words in (
        (MetricsConfig(token_file=str(tmp_path / "none")), "No such file"),
        (MetricsConfig(cert=str(tmp_path / "c"), key=str(tmp_path / "k")), "No such file"),
    ):
        with pytest.raises(HostError, match=words), serving(config):
            pass
    open_to_all = tmp_path / "token"
    open_to_all.write_text("t")
    open_to_all.chmod(0o644)
    with (
        pytest.raises(ConfigError, match="others may use it"),
        serving(MetricsConfig(token_file=str(open_to_all))),
    ):
        pass


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (MetricsConfig(), "there is no certificate for it"),
        (MetricsConfig(token_file="t"), "there is no certificate for it"),
        (MetricsConfig(cert="c", key="k"), "nobody is asked who he is"),
        (MetricsConfig(cert="c", key="k", token_file="t"), ""),
        (MetricsConfig(cert="c", key="k", ca="a"), ""),
    ],
)
def test_beyond_loopback_it_is_encrypted_and_for_known_askers(
    config: MetricsConfig, why: str
) -> None:
    assert open_metrics("127.0.0.1:1", config) == ""
    said = open_metrics("0.0.0.0:1", config)
    assert why in said and bool(said) == bool(why)


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="cert, key: expected both"):
        MetricsConfig(cert="c")
    with pytest.raises(ValueError, match="ca: expected cert and key"):
        MetricsConfig(ca="a")
