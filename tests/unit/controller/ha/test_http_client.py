"""One time for a whole request: who answers byte by byte is away, as who does not answer."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from pacekeeper.cli.admin.ca import Kind
from pacekeeper.controller.ha.http_client import Answer, AwayError, exchange, tls_context
from support.authorities import Authority

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
DRIP_S = 0.02
MOST_BYTES = 5000  # as many as it would drip in minutes


@contextmanager
def served(
    answer: Callable[[socket.socket], None], tls: ssl.SSLContext | None = None
) -> Iterator[str]:
    """Where one caller is answered so."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            one, _ = server.accept()
            with suppress(OSError), one:
                one = one if tls is None else tls.wrap_socket(one, server_side=True)
                one.recv(1 << 16)
                answer(one)
                one.close()

        thread = threading.Thread(target=serve)
        thread.start()
        scheme = "http" if tls is None else "https"
        yield f"{scheme}://127.0.0.1:{server.getsockname()[1]}/v3/kv/range"
        with suppress(OSError):  # nobody came where the time was over before
            socket.create_connection(server.getsockname()).close()
        thread.join(60.0)
        assert not thread.is_alive(), "who asked has hung up"


def dripping(start: bytes, drops: bytes) -> Callable[[socket.socket], None]:
    """Says the start at once, then a byte now and then."""

    def answer(one: socket.socket) -> None:
        one.sendall(start)
        gone = threading.Event()
        for i in range(MOST_BYTES):
            one.sendall(drops[i % len(drops) :][:1])
            gone.wait(DRIP_S)

    return answer


def listening(one: socket.socket) -> None:
    """Until who asked hangs up: its question may come in pieces."""
    while one.recv(1 << 16):
        pass


DRIPS = {
    "its first line": dripping(b"", b"HTTP/1.1 200 " + b"O" * MOST_BYTES),
    "its head": dripping(HEAD, b"x-a: b\r\n"),
    "its body": dripping(HEAD + b"Content-Length: 9000\r\n\r\n", b" "),
    "its end": dripping(HEAD + b"Connection: close\r\n\r\n", b" "),
    "its chunks": dripping(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "its words of a refusal": dripping(b"HTTP/1.1 503 Away\r\nContent-Length: 9000\r\n\r\n", b" "),
    "nothing": listening,
}


@pytest.mark.parametrize("what", DRIPS)
def test_who_answers_byte_by_byte_is_away_when_the_time_is_over(what: str) -> None:
    with served(DRIPS[what]) as url, pytest.raises(AwayError, match="time"):
        exchange("POST", url, {"key": "k"}, timeout_s=0.2)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def server_side(authority: Authority) -> ssl.SSLContext:
    cert = authority.cert(Kind.CONTROLLER, "etcd", hosts=("127.0.0.1",))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, cert.with_suffix(".key"))
    return context


def test_the_same_with_tls(authority: Authority) -> None:
    ours = tls_context(str(authority.ca), "", "")
    with (
        served(DRIPS["its body"], server_side(authority)) as url,
        pytest.raises(AwayError, match="time"),
    ):
        exchange("GET", url, None, timeout_s=0.5, context=ours)


def test_a_handshake_that_is_not_answered_ends_in_time(authority: Authority) -> None:
    ours = tls_context(str(authority.ca), "", "")
    with served(DRIPS["nothing"]) as url, pytest.raises(AwayError):
        exchange("GET", url.replace("http:", "https:"), None, timeout_s=0.2, context=ours)


@pytest.mark.parametrize("is_secure", [False, True])
def test_an_answer_in_pieces_is_whole_and_the_connection_is_closed(
    is_secure: bool, authority: Authority
) -> None:
    said = list[bytes]()

    def answer(one: socket.socket) -> None:
        for piece in (HEAD, b"Content-Length: 10\r\n\r\n", b'{"a": ', b"[1]}"):
            one.sendall(piece)
        said.append(one.recv(10))

    ours = tls_context(str(authority.ca), "", "") if is_secure else None
    with served(answer, server_side(authority) if is_secure else None) as url:
        told = exchange("GET", url, None, timeout_s=10.0, context=ours)
    assert told == Answer(status=200, body={"a": [1]})
    assert said == [b""]
