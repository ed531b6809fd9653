"""The certificates of a made-up fleet: an authority, its controller and all its nodes."""

from collections.abc import Iterable
from pathlib import Path

from pacekeeper.cli.admin import ca as authority


def made(folder: Path, nodes: Iterable[str]) -> Path:
    """In a folder: NODE.crt and NODE.key of each, and the settings of a controller, whose path."""
    now = authority.utc_now()
    ca = authority.create_authority(folder, "a fleet on paper", 30, now)

    def issue(kind: authority.Kind, name: str, *hosts: str) -> None:
        authority.issue_certificate(
            folder,
            authority.CertificateSubject(kind=kind, name=name, hosts=hosts),
            days=7,
            now=now,
            out=folder / name,
        )

    for node in nodes:
        issue(authority.Kind.NODE, node)
    issue(authority.Kind.CONTROLLER, "controller", "127.0.0.1")
    settings = folder / "controller.toml"
    cert, key = folder / "controller.crt", folder / "controller.key"
    settings.write_text(f'[tls]\nca = "{ca}"\ncert = "{cert}"\nkey = "{key}"\n')
    return settings
