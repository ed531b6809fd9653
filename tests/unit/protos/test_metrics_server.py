"""The metrics server: path, token, client certificates, rotation, and clients that send nothing."""

import contextlib
import http.client
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from pacekeeper.cli.admin.ca import Kind
from pacekeeper.core.config.metrics import MetricsConfig, unauthenticated_metrics
from pacekeeper.core.errors import ConfigError, HostError
from pacekeeper.core.prometheus_text import CONTENT_TYPE, MetricsPage
from pacekeeper.protos import metrics_server
from pacekeeper.protos.metrics_server import MetricsServer
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


def connected(server: MetricsServer, num: int) -> list[socket.socket]:
    """Open connections that have sent nothing."""
    address = ("127.0.0.1", server.server_port)
    return [socket.create_connection(address, timeout=60) for _ in range(num)]


def test_the_page_is_served_at_its_path_only() -> None:
    with serving() as server:
        assert ask(server) == (200, PAGE)
        assert ask(server, path="/metrics?x=1") == (200, PAGE)
        assert ask(server, path="/") == (404, b"")
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        connection.request("HEAD", "/metrics")
        answer = connection.getresponse()
        assert (answer.status, answer.headers["Content-Length"]) == (200, str(len(PAGE)))


def test_a_request_needs_the_current_token(tmp_path: Path) -> None:
    path = token_file(tmp_path / "token", "first")
    with serving(MetricsConfig(token_file=path)) as server:
        assert ask(server)[0] == 401
        assert ask(server, token="wrong")[0] == 401
        assert ask(server, token="first") == (200, PAGE)
        token_file(tmp_path / "token", "second")
        assert ask(server, token="first")[0] == 401
        assert ask(server, token="second") == (200, PAGE)
        (tmp_path / "token").unlink()
        assert ask(server, token="second")[0] == 401, "an unreadable file admits no request"


def test_with_authorities_a_client_needs_a_certificate(tmp_path: Path) -> None:
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
        for shown, is_known in ((None, False), (stranger, False), (viewer, True)):
            context = ssl.create_default_context(cafile=str(authority.ca))
            if shown is not None:
                context.load_cert_chain(shown, shown.with_suffix(".key"))
            if is_known:
                assert ask(server, context=context) == (200, PAGE)
            else:
                with pytest.raises(OSError):
                    ask(server, context=context)


def test_changed_files_are_used_from_the_next_connection_on(tmp_path: Path) -> None:
    """The certificate and the authorities; a damaged file leaves the ones of before in use."""
    first, second = Authority(tmp_path / "one"), Authority(tmp_path / "two")
    files = MetricsConfig(
        cert=str(tmp_path / "own.crt"), key=str(tmp_path / "own.key"), ca=str(tmp_path / "ca.crt")
    )
    clients = []
    for authority in (first, second):
        viewer = authority.cert(Kind.VIEWER, "prometheus")
        context = ssl.create_default_context(cafile=str(authority.ca))
        context.load_cert_chain(viewer, viewer.with_suffix(".key"))
        clients.append(context)

    def install(authority: Authority) -> None:
        cert = authority.cert(Kind.METRICS, "gpu-7", hosts=("127.0.0.1",))
        cert.with_suffix(".key").replace(files.key)
        cert.replace(files.cert)
        Path(files.ca).write_bytes(authority.ca.read_bytes())

    install(first)
    with serving(files) as server:
        assert ask(server, context=clients[0]) == (200, PAGE)
        with pytest.raises(OSError):
            ask(server, context=clients[1])
        Path(files.cert).write_bytes(b"no certificate")
        assert ask(server, context=clients[0]) == (200, PAGE)
        install(second)
        assert ask(server, context=clients[1]) == (200, PAGE)
        with pytest.raises(OSError):
            ask(server, context=clients[0])


def test_silent_connections_are_closed_and_block_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics_server._RequestHandler, "timeout", 1.0)
    authority = Authority(tmp_path)
    cert = authority.cert(Kind.METRICS, "gpu-7", hosts=("127.0.0.1",))
    files = MetricsConfig(cert=str(cert), key=str(cert.with_suffix(".key")))
    for config, context in (
        (None, None),
        (files, ssl.create_default_context(cafile=str(authority.ca))),
    ):
        with serving(config) as server, contextlib.ExitStack() as stack:
            silent = [stack.enter_context(one) for one in connected(server, 40)]
            silent[0].sendall(b"GET /metrics HTTP/1.0\r\nx: ")
            assert ask(server, context=context) == (200, PAGE)
            for one in silent[1:]:
                assert one.recv(1) == b"", "closed by the server"
    assert capfd.readouterr().err == ""


def test_connections_beyond_the_limit_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "MAX_CONNECTIONS", 2)
    with serving() as server:
        first, second = connected(server, 2)
        with connected(server, 1)[0] as third:
            assert third.recv(1) == b""
        for one in (first, second):
            one.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            with one, one.makefile("rb") as answer:
                assert answer.read().endswith(PAGE)
        for _ in range(3):
            with server._server._free:  # released a moment after the response
                pass
            assert ask(server) == (200, PAGE)


def test_unusable_files_are_refused_at_the_start(tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    for config in (MetricsConfig(token_file=missing), MetricsConfig(cert=missing, key=missing)):
        with pytest.raises(HostError, match=missing), serving(config):
            pass
    open_to_all = tmp_path / "token"
    open_to_all.write_text("t")
    open_to_all.chmod(0o644)
    with (
        pytest.raises(ConfigError, match="chmod"),
        serving(MetricsConfig(token_file=str(open_to_all))),
    ):
        pass


@pytest.mark.parametrize(
    ("config", "is_open"),
    [
        (MetricsConfig(), True),
        (MetricsConfig(token_file="t"), True),
        (MetricsConfig(cert="c", key="k"), True),
        (MetricsConfig(cert="c", key="k", token_file="t"), False),
        (MetricsConfig(cert="c", key="k", ca="a"), False),
    ],
)
def test_beyond_loopback_it_needs_tls_and_authentication(
    config: MetricsConfig, is_open: bool
) -> None:
    assert unauthenticated_metrics("127.0.0.1:1", config) == ""
    assert bool(unauthenticated_metrics("0.0.0.0:1", config)) == is_open


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="cert, key"):
        MetricsConfig(cert="c")
    with pytest.raises(ValueError, match="ca"):
        MetricsConfig(ca="a")


def test_the_page_shows_the_expiry_of_each_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    first = authority.cert(Kind.METRICS, "gpu-7", hosts=("gpu-7",))
    chain = tmp_path / "chain.crt"
    chain.write_bytes(b"a comment\n" + first.read_bytes() + authority.ca.read_bytes())
    damaged = tmp_path / "damaged.crt"
    damaged.write_bytes(first.read_bytes().replace(b"M", b"!", 1))
    page = MetricsPage()
    files = {"tls": chain, "metrics": tmp_path / "no", "other": damaged, "none": ""}
    metrics_server.write_expiry(page, {use: str(path) for use, path in files.items()})
    lines = [line for line in page.text().splitlines() if not line.startswith("#")]
    expected = (authority.now + timedelta(days=1)).replace(microsecond=0).timestamp()
    assert [line.split("{")[1] for line in lines] == [
        f'use="tls"}} {expected}',
        'use="metrics"} 0.0',
        'use="other"} 0.0',
    ]
