"""The web page: who may see and do what, by cookie or by token, and that it is nobody else's."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

starlette = pytest.importorskip("starlette.testclient", reason="needs pacekeeper[web]")

from httpx2 import Response  # noqa: E402
from starlette.testclient import TestClient  # noqa: E402

from pacekeeper.controller.api.auth.rbac import Role  # noqa: E402
from pacekeeper.controller.api.auth.tokens import (  # noqa: E402  # noqa: E402
    TokenFile,
    TokenRecord,
    change_tokens,
    format_token,
    secret_digest,
)
from pacekeeper.controller.api.web.auth import LOGINS, MAX_BODY_BYTES  # noqa: E402
from pacekeeper.controller.api.web.responses import HEADERS  # noqa: E402
from pacekeeper.controller.state.events import OrderGiven, ProposalAnswered  # noqa: E402
from pacekeeper.core.incidents.operator_orders import OrderKind  # noqa: E402
from support.web_scene import Scene, scene  # noqa: E402

HERE = "http://127.0.0.1:8080"
PAGES = [
    "/",
    "/incidents",
    "/incidents/1",
    "/nodes",
    "/nodes/gpu-002",
    "/strikes",
    "/jobs/ablation-7",
    "/jobs/ablation-7/layout",
]
PARTS = [
    "/part/fleet",
    "/part/incidents",
    "/part/nodes",
    "/part/strikes",
    "/part/jobs/pretrain-moe",
    "/part/jobs/ablation-7/head",
]
DATA = [
    "/data/fleet",
    "/data/jobs/pretrain-moe",
    "/data/jobs/ablation-7/layout",
    "/data/incidents/1",
]
HTML = {"accept": "text/html"}
PAUSE = {"kind": "pause", "subject": "ablation-7", "is_on": "1"}


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[Scene]:
    found = scene(tmp_path, num_nodes=4)
    yield found
    found.history.store.close()
    found.audit.close()


class Tokens:
    """A file with one token of each role."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tokens"
        self.of: dict[Role, str] = {}
        records = []
        for i, role in enumerate((Role.VIEWER, Role.OPERATOR, Role.AGENT)):
            name = f"{i:08x}"
            secret = "s" * 42 + str(i)
            self.of[role] = format_token(name, secret)
            records.append(
                TokenRecord(
                    token_id=name,
                    secret_sha256=secret_digest(secret),
                    role=role,
                    name=f"{role}-ann",
                    created_unix_s=0.0,
                    expires_unix_s=4e9,
                )
            )
        change_tokens(self.path, lambda known: tuple(records))

    def revoke(self, role: Role) -> None:
        change_tokens(self.path, lambda known: tuple(r for r in known if r.role is not role))


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(tmp_path)


def opened(seen: Scene) -> TestClient:
    return TestClient(seen.web().app(), base_url=HERE)


def guarded(seen: Scene, tokens: Tokens, *, is_secure: bool = False) -> TestClient:
    app = seen.web(tokens=TokenFile(tokens.path), is_secure=is_secure).app()
    scheme = "https" if is_secure else "http"
    return TestClient(app, base_url=f"{scheme}://pace.example", follow_redirects=False)


def logged_in(client: TestClient, token: str) -> Response:
    answer: Response = client.post("/login", data={"token": token})
    return answer


def secret_of(client: TestClient) -> str:
    """What a page of ours says, and no other site can read."""
    page = client.get("/", headers=HTML).text
    return str(json.loads(page.split("hx-headers='", 1)[1].split("'", 1)[0])["X-CSRF-Token"])


def audited(seen: Scene) -> list[dict[str, str]]:
    return [json.loads(line) for line in seen.audit.path.read_text().splitlines()]


def test_every_page_and_all_its_data_are_there(seen: Scene) -> None:
    client = opened(seen)
    for path in (*PAGES, *PARTS):
        answer = client.get(path, headers=HTML)
        assert answer.status_code == 200 and "text/html" in answer.headers["content-type"], path
    for path in DATA:
        answer = client.get(path)
        assert answer.status_code == 200 and answer.json(), path


@pytest.mark.parametrize("path", [*PAGES, *DATA, "/login", "/nope", "/static/common.js", "/jobs/x"])
def test_every_answer_forbids_other_origins(seen: Scene, path: str) -> None:
    headers = opened(seen).get(path, headers=HTML).headers
    policy = headers["content-security-policy"]
    assert policy == HEADERS["content-security-policy"]
    assert (
        "unsafe" not in policy and "http" not in policy and policy.startswith("default-src 'none'")
    )
    assert headers["x-frame-options"] == "DENY" and headers["x-content-type-options"] == "nosniff"


def test_no_page_names_another_origin_or_has_script_or_style_in_it(seen: Scene) -> None:
    client = opened(seen)
    for path in (*PAGES, *PARTS):
        html = client.get(path, headers=HTML).text
        assert "http:" not in html and "https:" not in html
        assert "style=" not in html and "<style" not in html and " onclick" not in html
        assert html.count("<script") == html.count('<script src="/static/')


def test_what_an_enemy_named_is_text(seen: Scene) -> None:
    name = "<img src=x onerror=alert(1)>"
    node = seen.state.nodes["gpu-000"]
    seen.state = seen.state.__class__(
        **{
            **{f: getattr(seen.state, f) for f in seen.state.__dataclass_fields__},
            "nodes": {name: node.__class__(name=name, agent_incarnation="a")},
        }
    )
    html = opened(seen).get("/nodes", headers=HTML).text
    assert "<img src=x" not in html and "&lt;img src=x" in html


def test_the_heat_map_has_every_rank_with_its_state(seen: Scene) -> None:
    told = opened(seen).get("/data/fleet").json()
    small, large = told["jobs"]
    assert (small["name"], large["name"]) == ("ablation-7", "pretrain-moe")
    assert sorted(small["rank"]) == list(range(16)) and small["nodes"] == ["gpu-002", "gpu-003"]
    assert {len(large[column]) for column in ("node", "state", "slowdown", "cordoned")} == {16}
    assert small["slowdown"][small["rank"].index(3)] == 1.35


def test_the_incident_page_is_the_explanation(seen: Scene) -> None:
    client = opened(seen)
    told = client.get("/data/incidents/1").json()
    page = client.get("/incidents/1", headers=HTML).text
    assert told["incident"]["rank"] == 21 and told["gain_ratio"] == pytest.approx(0.22, abs=0.01)
    assert "its clock was held down by heat" in page and "it may pass" in page
    assert "22" in page.split("measured gain")[1][:60]


def test_a_person_is_asked_why_and_the_answer_is_part_of_the_order(
    seen: Scene, tokens: Tokens
) -> None:
    client = guarded(seen, tokens)
    logged_in(client, tokens.of[Role.OPERATOR])
    headers = {"x-csrf-token": secret_of(client)}
    client.post("/act/order", data=PAUSE, headers={**headers, "hx-prompt": "ticket 4711"})
    encoded = {"hx-prompt": "%E9%A3%8E%E6%89%87", "hx-prompt-uri-autoencoded": "true"}
    client.post("/act/order", data=PAUSE, headers={**headers, **encoded})
    said = [event.reason for event in seen.heard if isinstance(event, OrderGiven)]
    assert said == ["ticket 4711", "\u98ce\u6247"]
    assert "reason=ticket 4711" in audited(seen)[-2]["about"]


def test_what_is_not_there_is_said(seen: Scene) -> None:
    client = opened(seen)
    page = client.get("/jobs/nope", headers=HTML)
    assert page.status_code == 404 and "ablation-7, pretrain-moe" in page.text
    for path, name in (("/nodes/nope", "nope"), ("/data/incidents/99", "99")):
        answer = client.get(path)
        assert answer.status_code == 404 and name in answer.json()["error"]
    assert client.get(f"/data/incidents/{1 << 70}").status_code == 404
    assert client.get("/data/jobs/ablation-7/layout?generation=7").status_code == 404


def test_an_open_page_answers_to_names_of_loopback_only(seen: Scene) -> None:
    app = seen.web().app()
    for host, status in (
        ("127.0.0.1:8080", 200),
        ("localhost", 200),
        ("[::1]:8080", 200),
        ("rebound.example", 421),
        ("10.0.0.5:8080", 421),
        ("", 421),
    ):
        answer = TestClient(app, base_url=HERE).get("/data/fleet", headers={"host": host})
        assert answer.status_code == status, host
    assert [line["verdict"] for line in audited(seen)] == ["refused"] * 3
    assert [line["verdict"] for line in audited(seen)] == ["refused"] * 3


def test_on_loopback_acts_take_the_secret_of_our_own_page(seen: Scene) -> None:
    client = opened(seen)
    secret = secret_of(client)
    guesses: list[dict[str, Any]] = [
        {},
        {"x-csrf-token": "guess"},
        {"x-csrf-token": "\u00e9".encode()},
    ]
    for headers in guesses:
        assert client.post("/act/order", data=PAUSE, headers=headers).status_code == 403
    assert not seen.heard
    other = TestClient(seen.web().app(), base_url=HERE)
    assert other.post("/act/order", data=PAUSE, headers={"x-csrf-token": secret}).status_code == 403
    done = client.post("/act/order", data=PAUSE, headers={"x-csrf-token": secret})
    assert done.status_code == 200
    assert done.headers["hx-trigger"] == "changed"
    (event,) = seen.heard
    assert isinstance(event, OrderGiven) and (event.kind, event.is_on) == (OrderKind.PAUSE, True)


def test_without_a_token_nothing_is_seen_and_a_person_is_sent_to_the_login(
    seen: Scene, tokens: Tokens
) -> None:
    client = guarded(seen, tokens)
    for path in (*PAGES, *PARTS, *DATA):
        answer = client.get(path)
        assert answer.status_code == 401 and "pretrain" not in answer.text, path
    page = client.get("/", headers=HTML)
    assert (page.status_code, page.headers["location"]) == (303, "/login")
    assert client.post("/act/order", data=PAUSE).status_code == 401
    assert client.get("/static/common.js").status_code == 200
    assert {line["verdict"] for line in audited(seen)} == {"refused"}


@pytest.mark.parametrize("role", [Role.VIEWER, Role.OPERATOR])
def test_a_cookie_is_not_for_scripts_nor_for_other_sites(
    seen: Scene, tokens: Tokens, role: Role
) -> None:
    client = guarded(seen, tokens, is_secure=True)
    answer = logged_in(client, tokens.of[role])
    assert answer.status_code == 303
    cookie = answer.headers["set-cookie"].lower()
    assert cookie.startswith("__host-pacekeeper=")
    assert all(word in cookie for word in ("httponly", "samesite=strict", "secure", "path=/"))
    assert tokens.of[role].lower() not in cookie, "the token itself stays where it was"
    page = client.get("/jobs/ablation-7", headers=HTML)
    assert page.status_code == 200 and f"{role}/{role}-ann by token" in page.text
    assert ("hx-post" in page.text) == (role is Role.OPERATOR), "buttons are for who may act"
    assert "strict-transport-security" in page.headers


def test_a_viewer_can_not_act_and_that_is_audited(seen: Scene, tokens: Tokens) -> None:
    client = guarded(seen, tokens)
    logged_in(client, tokens.of[Role.VIEWER])
    secret = secret_of(client)
    answer = client.post("/act/order", data=PAUSE, headers={"x-csrf-token": secret})
    assert answer.status_code == 403 and "role operator" in answer.json()["error"]
    by_header = client.post(
        "/act/order", data=PAUSE, headers={"authorization": f"Bearer {tokens.of[Role.VIEWER]}"}
    )
    assert by_header.status_code == 403 and not seen.heard
    refused = [line for line in audited(seen) if line["verdict"] == "refused"]
    assert len(refused) == 2 and "kind=pause subject=ablation-7" in refused[0]["about"]


def test_an_operator_acts_by_cookie_and_secret_and_it_is_audited_first(
    seen: Scene, tokens: Tokens
) -> None:
    client = guarded(seen, tokens)
    logged_in(client, tokens.of[Role.OPERATOR])
    assert client.post("/act/order", data=PAUSE).status_code == 403
    headers = {"x-csrf-token": secret_of(client)}
    deny = {"proposal": "1", "is_approved": "0", "reason": "not\nnow"}
    assert client.post("/act/answer", data=deny, headers=headers).json()["done"]
    approve = {**deny, "is_approved": "1"}
    again = client.post("/act/answer", data=approve, headers=headers)
    assert again.status_code == 409 and "is denied by web" in again.json()["error"]
    (event,) = seen.heard
    assert isinstance(event, ProposalAnswered)
    assert (event.operator, event.reason) == ("web (operator/operator-ann by token)", "not now")
    assert [line["verdict"] for line in audited(seen)] == ["allowed", "refused", *["allowed"] * 2]


def test_a_program_acts_with_its_token_alone(seen: Scene, tokens: Tokens) -> None:
    client = guarded(seen, tokens)
    headers = {"authorization": f"Bearer {tokens.of[Role.OPERATOR]}"}
    assert client.post("/act/order", data=PAUSE, headers=headers).status_code == 200
    back = {**PAUSE, "is_on": "0"}
    assert client.post("/act/order", data=back, headers=headers).status_code == 200
    assert client.post("/act/order", data=back, headers=headers).status_code == 404
    for wrong in ("Basic abc", "Bearer nope", "Bearer "):
        assert client.get("/data/fleet", headers={"authorization": wrong}).status_code == 401


def test_an_agent_sees_nothing(seen: Scene, tokens: Tokens) -> None:
    client = guarded(seen, tokens)
    answer = logged_in(client, tokens.of[Role.AGENT])
    assert answer.status_code == 403 and "set-cookie" not in answer.headers
    by_header = client.get(
        "/data/fleet", headers={"authorization": f"Bearer {tokens.of[Role.AGENT]}"}
    )
    assert by_header.status_code == 403


def test_a_session_ends_with_its_token_and_with_the_logout(seen: Scene, tokens: Tokens) -> None:
    client = guarded(seen, tokens)
    logged_in(client, tokens.of[Role.OPERATOR])
    assert client.get("/data/fleet").status_code == 200
    cookie = dict(client.cookies)
    client.post("/logout")
    client.cookies.update(cookie)
    assert client.get("/data/fleet").status_code == 401, "the cookie of old is worth nothing"
    again = guarded(seen, tokens)
    logged_in(again, tokens.of[Role.OPERATOR])
    assert again.get("/data/fleet").status_code == 200
    tokens.revoke(Role.OPERATOR)
    assert again.get("/data/fleet").status_code == 401


def test_guessing_tokens_is_slow_and_written_down(seen: Scene, tokens: Tokens) -> None:
    client = guarded(seen, tokens)
    codes = [logged_in(client, "pk1.00000000." + "x" * 43).status_code for _ in range(12)]
    assert codes == [403] * LOGINS.at_once + [429] * (12 - LOGINS.at_once)
    assert [line["action"] for line in audited(seen)] == ["login"] * 12
    assert [line["action"] for line in audited(seen)] == ["login"] * 12
    assert all("x" * 43 not in json.dumps(line) for line in audited(seen))


def test_a_form_of_another_site_logs_nobody_in(seen: Scene, tokens: Tokens) -> None:
    client = guarded(seen, tokens)
    answer = client.post(
        "/login",
        data={"token": tokens.of[Role.OPERATOR]},
        headers={"origin": "http://evil.example"},
    )
    assert answer.status_code == 403 and "set-cookie" not in answer.headers


def test_what_is_too_large_or_nonsense_is_refused(seen: Scene) -> None:
    client = opened(seen)
    headers = {"x-csrf-token": secret_of(client)}
    large = client.post("/act/order", content=b"x" * (MAX_BODY_BYTES + 1), headers=headers)
    assert large.status_code == 413
    for path, form in (
        ("/act/order", {"kind": "nope"}),
        ("/act/order", {}),
        ("/act/answer", {"proposal": "\u0661"}),
        ("/act/answer", {"proposal": "9" * 40}),
        ("/act/order", {"kind": "pause", "subject": "nope", "is_on": "1"}),
    ):
        assert client.post(path, data=form, headers=headers).status_code == 404, form
    many = "&".join(f"a{i}=1" for i in range(100))
    assert client.post("/act/order", content=many, headers=headers).status_code == 400
    assert not seen.heard
    assert client.get("/act/order").status_code == 405
    assert client.post("/logout", headers={"origin": "http://[].1"}).status_code == 403


def test_an_address_that_is_no_text_is_refused(seen: Scene) -> None:
    """Browsers write it otherwise; who writes it so finds no error of ours."""
    told: list[dict[str, Any]] = []
    scope = {
        "type": "http", "method": "GET", "path": "/jobs/x", "raw_path": b"/jobs/x",
        "query_string": b"generation=\xaf", "headers": [(b"host", b"127.0.0.1")],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "scheme": "http",
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        told.append(message)

    asyncio.run(seen.web().app()(scope, receive, send))
    assert told[0]["status"] == 400


def test_what_can_not_be_written_down_is_not_done(seen: Scene, tokens: Tokens) -> None:
    client = guarded(seen, tokens)
    headers = {"authorization": f"Bearer {tokens.of[Role.OPERATOR]}"}
    seen.audit.note = lambda event: False  # type: ignore[method-assign]
    answer = client.post("/act/order", data=PAUSE, headers=headers)
    assert answer.status_code == 503 and not seen.heard
