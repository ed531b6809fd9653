"""Until when our own certificates count, for Prometheus: read when it asks, for files rotate."""

from collections.abc import Mapping
from pathlib import Path

from pacekeeper.core.certificates import ends_unix_s
from pacekeeper.core.prometheus_text import Family, Page

ENDS = Family(
    "pacekeeper_certificate_expiry_timestamp_seconds",
    "When the certificate in force for this use ends; 0: its file can not be read.",
    "use",
)


def write(page: Page, files: Mapping[str, str]) -> None:
    """`files`: by what they are used for; empty where there is none."""
    for use, path in files.items():
        if path:
            page.add(ENDS, _end(path), use)


def _end(path: str) -> float:
    try:
        return ends_unix_s(Path(path).read_text("ascii", "replace"))
    except (OSError, ValueError):
        return 0.0  # long over: whoever reads it next finds it so, too
