"""Beyond loopback nothing goes in the clear, and nobody is answered unknown, unless told to."""

from pathlib import Path

import pytest

from pacekeeper.agent.daemon import Agent
from pacekeeper.controller.api.auth.listeners import reject_unprotected_listeners
from pacekeeper.core.addresses import is_loopback
from pacekeeper.core.config.agent import AgentConfig
from pacekeeper.core.config.client import ClientConfig
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.loader import read_config
from pacekeeper.core.config.security import (
    AccessConfig,
    LimitsConfig,
    TlsConfig,
    unauthenticated_listener,
)
from pacekeeper.core.errors import ConfigError, HostError

TLS = TlsConfig(cert="c", key="k")
MUTUAL = TlsConfig(ca="a", cert="c", key="k")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "[::1]", "::1"])
def test_loopback_is_what_surely_stays_here(host: str) -> None:
    assert is_loopback(f"{host}:7443")


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "[::]", "10.0.0.1", "localhost.evil.example", "node-0", "127.0.0.1.nip.io"]
)
def test_everything_else_may_lead_anywhere(host: str) -> None:
    assert not is_loopback(f"{host}:7443")


@pytest.mark.parametrize(
    ("address", "tls", "tokens", "is_refused"),
    [
        ("127.0.0.1:1", TlsConfig(), "", False),
        ("0.0.0.0:1", TlsConfig(), "", True),
        ("0.0.0.0:1", TlsConfig(), "tokens", True),
        ("0.0.0.0:1", TLS, "", True),
        ("0.0.0.0:1", TLS, "tokens", False),
        ("0.0.0.0:1", MUTUAL, "", False),
    ],
)
def test_who_listens_to_the_world_is_encrypted_and_knows_its_callers(
    address: str, tls: TlsConfig, tokens: str, is_refused: bool
) -> None:
    assert bool(unauthenticated_listener("--listen", address, tls, tokens)) == is_refused
    config = ControllerConfig(listen=address, tls=tls, access=AccessConfig(tokens=tokens))
    if is_refused:
        with pytest.raises(ConfigError, match=r"--listen 0\.0\.0\.0:1 is beyond.*--insecure"):
            reject_unprotected_listeners(config)
    else:
        reject_unprotected_listeners(config)


def test_it_is_done_all_the_same_where_it_was_told_to() -> None:
    reject_unprotected_listeners(
        ControllerConfig(listen="0.0.0.0:1", metrics_listen="0.0.0.0:2", insecure=True)
    )


def test_metrics_have_a_certificate_of_their_own_or_none() -> None:
    with pytest.raises(ConfigError, match=r"--metrics-listen 0\.0\.0\.0:2 is beyond loopback"):
        reject_unprotected_listeners(ControllerConfig(tls=MUTUAL, metrics_listen="0.0.0.0:2"))


def test_a_controller_that_requires_certificates_has_one() -> None:
    with pytest.raises(ConfigError, match=r"\[tls\] cert"):
        reject_unprotected_listeners(ControllerConfig(tls=TlsConfig(ca="a")))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"controller": "far.example:7443"}, "controller far.example:7443 is beyond loopback"),
        ({"metrics_listen": "0.0.0.0:9464"}, "--metrics-listen 0.0.0.0:9464 is beyond loopback"),
        ({"tls": TlsConfig(ca="not-there.crt")}, "not-there.crt: No such file"),
        ({"token_file": "not-there"}, "not-there: No such file"),
        (
            {"controller": "far.example:7443", "insecure": True, "token_file": "t"},
            "its token would be sent",
        ),
    ],
)
def test_an_agent_obeys_nobody_beyond_loopback_in_the_clear(
    tmp_path: Path, settings: dict[str, object], words: str
) -> None:
    with pytest.raises((ConfigError, HostError), match=words):
        Agent(AgentConfig(**{"ring_dir": str(tmp_path), **settings}))  # type: ignore[arg-type]


def test_one_file_tells_every_part_its_certificates() -> None:
    text = "[tls]\nca = 'a'\ncert = 'c'\nkey = 'k'\n"
    assert read_config(AgentConfig, text, file="f").tls == MUTUAL
    assert read_config(ControllerConfig, text, file="f").tls == MUTUAL
    assert read_config(ClientConfig, text, file="f").tls == MUTUAL


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tls]\ncert='c'", r"^f: \[tls\] cert, key: "),
        ("[access]\ntrust_domain='a/b'", r"^f: \[access\] trust_domain: .*'a/b'"),
        ("[access]\ntrust_domain=''", r"^f: \[access\] trust_domain: .*''"),
        ("[access]\naudit_max_bytes=1", r"^f: \[access\] audit_max_bytes: .*65536"),
        ("[access]\naudit_kept=0", r"^f: \[access\] audit_kept: .* 1, got 0"),
        ("[limits]\ncalls_per_s=0", r"^f: \[limits\] calls_per_s: .* 0, got 0"),
        ("[limits]\nwatches=0", r"^f: \[limits\] watches: .* 0, got 0"),
        ("[limits]\nmax_question_bytes=1", r"^f: \[limits\] max_question_bytes: .*1024"),
        ("[client]\ncontroller='nowhere'", r"^f: \[client\] controller: .*HOST:PORT"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config(ClientConfig, text, file="f")


def test_limits_leave_room_for_what_agents_do() -> None:
    """A spool full of reports after an outage is read at once."""
    assert LimitsConfig().reports_at_once >= AgentConfig().spool_batches
    assert LimitsConfig().reports_per_s > 10.0 / AgentConfig().poll_interval_s
