"""An API server on paper that keeps Leases as the real one does: resourceVersion and uid decide.

As documented for Kubernetes' API conventions: a create of what is there is a conflict; a replace
needs the resourceVersion that is there (without one it is unconditional, which nobody here does),
and the uid, where one is said; every write gets another version, of the whole server.
"""

import json
import ssl
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pacekeeper.cli.admin.ca import Kind
from support.authorities import Authority

LEASES = "/apis/coordination.k8s.io/v1/namespaces/"
TOKEN = "a-token-of-a-pod"


class FakeKubernetes:
    """On any free port of loopback, over TLS; `objects` by namespace/name."""

    def __init__(self, directory: Path) -> None:
        authority = Authority(directory / "k8s-pki")
        cert = authority.cert(Kind.CONTROLLER, "api", hosts=("127.0.0.1",))
        self.ca = str(authority.ca)
        self.token_file = directory / "token"
        self.token_file.write_text(TOKEN + "\n")
        self.objects: dict[str, dict[str, Any]] = {}
        self._version = 1000
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size)) if size else {}
                status, found = fake._answer(
                    self.command, self.path, body, self.headers.get("Authorization", "")
                )
                data = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = handle_any

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, cert.with_suffix(".key"))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def settings(self) -> str:
        """Lines of [lease]."""
        api = f"https://127.0.0.1:{self._server.server_address[1]}"
        return f'api = "{api}"\nca = "{self.ca}"\ntoken_file = "{self.token_file}"\n'

    def close(self) -> None:
        """Nothing answers any more."""
        self._server.shutdown()
        self._server.server_close()

    def put(self, key: str, lease: dict[str, Any]) -> None:
        """As another program would."""
        with self._lock:
            self._keep(key, lease, str(uuid.uuid4()))

    def _answer(
        self, method: str, path: str, body: dict[str, Any], shown: str
    ) -> tuple[int, dict[str, Any]]:
        if shown != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized")
        namespace, _, rest = path.removeprefix(LEASES).partition("/leases")
        name = rest.removeprefix("/") if method != "POST" else body["metadata"]["name"]
        key = f"{namespace}/{name}"
        with self._lock:
            there = self.objects.get(key)
            if method == "POST":
                if there is not None:
                    return _status(409, f'leases "{name}" already exists')
                return 201, self._keep(key, body, str(uuid.uuid4()))
            if there is None:
                return _status(404, f'leases "{name}" not found')
            if method == "GET":
                return 200, there
            said, known = body["metadata"], there["metadata"]
            for field in ("uid", "resourceVersion"):
                if said.get(field, known[field]) != known[field]:
                    return _status(409, "the object has been modified")
            return 200, self._keep(key, body, known["uid"])

    def _keep(self, key: str, lease: dict[str, Any], uid: str) -> dict[str, Any]:
        self._version += 1
        metadata = {**lease["metadata"], "uid": uid, "resourceVersion": str(self._version)}
        self.objects[key] = {**lease, "metadata": metadata}
        return self.objects[key]


def _status(code: int, message: str) -> tuple[int, dict[str, Any]]:
    return code, {"kind": "Status", "status": "Failure", "code": code, "message": message}
