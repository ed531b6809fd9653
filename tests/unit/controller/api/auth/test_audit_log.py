"""The audit log: whole lines, only appended, for its owner, and not to be flooded."""

import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.controller.api.auth.audit_log import (
    ATTACHES,
    REJECTIONS,
    UNIDENTIFIED,
    AuditEvent,
    AuditLog,
)
from pacekeeper.controller.api.auth.peer_identity import host_of
from pacekeeper.controller.api.auth.rbac import Action, Principal, Role
from pacekeeper.core.errors import HostError


def audit(folder: Path, *, max_bytes: int = 1 << 20, kept: int = 3) -> AuditLog:
    return AuditLog(folder / "audit.jsonl", max_bytes=max_bytes, kept=kept, on_failure=lambda: None)


def event(
    caller: str = "operator/ann",
    role: Role = Role.OPERATOR,
    *,
    is_allowed: bool = True,
    about: str = "",
) -> AuditEvent:
    return AuditEvent(
        action="act",
        principal=Principal(name=caller, role=role),
        is_allowed=is_allowed,
        about=about,
        peer="ipv4:192.0.2.1:5",
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_says_who_did_what_where_and_whether_it_was_allowed(tmp_path: Path) -> None:
    log = audit(tmp_path)
    assert log.note(event(about="job=moe"))
    (line,) = lines(log.path)
    assert line | {"unix_s": 0} == {
        "unix_s": 0, "verdict": "allowed", "action": "act", "caller": "operator/ann",
        "peer": "ipv4:192.0.2.1:5", "about": "job=moe", "reason": "",
    }  # fmt: skip


def test_nobody_else_may_read_it_and_what_was_there_stays(tmp_path: Path) -> None:
    before = audit(tmp_path)
    before.note(event("first"))
    before.close()
    after = audit(tmp_path)
    after.note(event("second"))
    assert [line["caller"] for line in lines(after.path)] == ["first", "second"]
    assert stat.S_IMODE(after.path.stat().st_mode) == 0o600


def test_no_name_can_make_a_line_of_its_own(tmp_path: Path) -> None:
    log = audit(tmp_path)
    log.note(event('x"\n{"verdict": "allowed"}\x1b[2J\u2028' + "y" * 10_000))
    (line,) = lines(log.path)
    assert log.path.read_bytes().isascii() and b"\x1b" not in log.path.read_bytes()
    assert len(line["caller"]) == 500


def test_at_its_size_it_is_set_aside_and_the_oldest_goes(tmp_path: Path) -> None:
    log = audit(tmp_path, max_bytes=300, kept=2)
    for number in range(9):
        log.note(event(f"caller-{number}"))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    kept = [line["caller"] for name in reversed(names) for line in lines(tmp_path / name)]
    assert kept == [f"caller-{number}" for number in range(9 - len(kept), 9)]
    assert all(path.stat().st_size <= 300 for path in tmp_path.iterdir())


def test_who_is_refused_for_ever_does_not_push_the_rest_out(tmp_path: Path) -> None:
    log = audit(tmp_path)
    for _ in range(REJECTIONS.at_once + 50):
        assert log.note(event("mallory", is_allowed=False))
    log.note(event("ann"))
    found = lines(log.path)
    assert len(found) <= REJECTIONS.at_once + 2
    assert found[-1]["refusals_not_written_before"] >= 49
    log.note(event("eve", is_allowed=False))
    assert lines(log.path)[-1]["caller"] == "eve", "others have a limit of their own"


def test_what_can_not_be_written_is_said_and_written_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = audit(tmp_path)
    with monkeypatch.context() as broken:

        def full_disk(descriptor: int, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        broken.setattr(os, "write", full_disk)
        assert not log.note(event())
    assert log.note(event("later"))
    assert [line["caller"] for line in lines(log.path)] == ["later"]


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / "audit.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HostError, match=r"audit log .*audit\.jsonl"):
        audit(tmp_path)


def test_a_peers_host_is_what_stands_before_its_port() -> None:
    assert host_of("ipv4:192.0.2.1:5000") == "ipv4:192.0.2.1"
    assert host_of("ipv6:%5B::1%5D:5000") == "ipv6:%5B::1%5D"


def test_strangers_from_ever_new_addresses_do_not_push_the_rest_out(tmp_path: Path) -> None:
    log = audit(tmp_path)
    for number in range(UNIDENTIFIED.at_once + 500):
        stranger = replace(
            event("nobody", Role.ANONYMOUS, is_allowed=False), peer=f"ipv6:[2001:db8::{number:x}]:7"
        )
        assert log.note(stranger)
    assert len(lines(log.path)) <= UNIDENTIFIED.at_once + 5
    log.note(event("agent/gpu-1", is_allowed=False))
    found = lines(log.path)[-1]
    assert found["caller"] == "agent/gpu-1", "who is known has a limit of its own"
    assert found["refusals_not_written_before"] >= 490


def test_callers_of_an_open_controller_are_strangers(tmp_path: Path) -> None:
    log = audit(tmp_path)
    for number in range(UNIDENTIFIED.at_once + 500):
        log.note(
            replace(
                event("open", Role.OPEN, is_allowed=False),
                peer=f"ipv4:10.0.{number // 250}.{number}:5",
            )
        )
    assert len(lines(log.path)) <= UNIDENTIFIED.at_once + 5


def test_who_attaches_for_ever_does_not_push_the_rest_out_either(tmp_path: Path) -> None:
    log = audit(tmp_path)
    attach = replace(event("agent/gpu-1"), action=Action.ATTACH)
    for _ in range(ATTACHES.at_once + 300):
        assert log.note(attach)
    log.note(replace(attach, principal=Principal(name="agent/gpu-2", role=Role.AGENT)))
    found = lines(log.path)
    assert len(found) <= ATTACHES.at_once + 5
    assert found[-1]["caller"] == "agent/gpu-2"
    assert found[-1]["attaches_not_written_before"] >= 295
    for _ in range(ATTACHES.at_once + 300):
        log.note(event("operator/ann"))
    assert len(lines(log.path)) > 2 * ATTACHES.at_once + 290, "what is done is always written"
