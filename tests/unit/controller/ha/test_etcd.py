"""Whatever stands in etcd's place answers: it is a lease that is away, and never another error."""

import base64
import json
import socket
import threading
from typing import Any

import pytest

from pacekeeper.controller.ha import etcd
from pacekeeper.controller.ha.etcd import EtcdLease
from pacekeeper.controller.ha.http_client import Answer, AwayError, exchange
from pacekeeper.controller.ha.lease import Record, encode_record

RECORD = Record(
    term=7, holder="a", life="b", address="h:1", duration_s=4.0, copies=("c",), renewals=3
)
NUMBERS = ("Infinity", "-Infinity", "NaN", "[]", "null", '"x"', "{}", '"' + "9" * 5000 + '"')


def _answering(monkeypatch: pytest.MonkeyPatch, body: str) -> EtcdLease:
    def exchange(*_: Any, **__: Any) -> Answer:
        return Answer(status=200, body=json.loads(body))

    monkeypatch.setattr(etcd, "exchange", exchange)
    return EtcdLease(("http://127.0.0.1:1",), "k", timeout_s=1.0)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_revision_that_is_none_is_no_answer(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = '{"succeeded": true, "header": {"revision": %s}}' % number  # noqa: UP031
    with pytest.raises(AwayError, match="without a revision"):
        _answering(monkeypatch, body).write(RECORD, "8")


@pytest.mark.parametrize("number", NUMBERS)
def test_a_record_of_no_revision_is_none_of_ours(
    number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = base64.b64encode(encode_record(RECORD).encode()).decode()
    body = '{"kvs": [{"value": "%s", "mod_revision": %s}]}' % (value, number)  # noqa: UP031
    with pytest.raises(AwayError, match="no record of ours"):
        _answering(monkeypatch, body).read()


def test_what_is_ours_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    value = base64.b64encode(encode_record(RECORD).encode()).decode()
    body = json.dumps({"kvs": [{"value": value, "mod_revision": "8"}]})
    assert _answering(monkeypatch, body).read() == (RECORD, "8")


@pytest.mark.parametrize("status", ["200 OK", "404 Gone", "500 Wrong", "503 Away"])
@pytest.mark.parametrize(
    "rest",
    [
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\n{}",
        b"Content-Length: 50\r\n\r\n{}",
        b"\r\n" + b"[" * 100_000,
    ],
)
def test_an_answer_that_breaks_off_is_no_answer_or_an_empty_one(status: str, rest: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            one, _ = server.accept()
            with one:
                one.recv(1 << 16)
                one.sendall(f"HTTP/1.1 {status}\r\nConnection: close\r\n".encode() + rest)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.getsockname()[1]}/x"
            assert exchange("POST", url, {}, timeout_s=5.0).body == {}
        except AwayError:
            pass
        finally:
            thread.join()
