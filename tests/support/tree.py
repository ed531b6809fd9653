"""What belongs to the project, by git: tests of conventions and packaging look at nothing else."""

import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "core",
    "agent",
    "predictor",
    "controller",
    "trainer",
    "simulator",
    "cli",
    "protos",
)
GENERATED = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


@cache
def project_files(*, with_new: bool = False) -> tuple[str, ...]:
    """Paths below ROOT that git tracks and that exist; `with_new`: also those it would take.

    Links are left out: they name what stands elsewhere. Skips the test outside a git checkout.
    """
    which = ["--cached", "--others", "--exclude-standard"] if with_new else ["--cached"]
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", *which], cwd=ROOT, capture_output=True, check=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs a git checkout: {error}")
    paths = sorted(set(filter(None, listed.split("\0"))))
    return tuple(p for p in paths if (ROOT / p).is_file() and not (ROOT / p).is_symlink())


def modules() -> tuple[str, ...]:
    """The project's own Python files: all but generated code."""
    return tuple(p for p in project_files() if p.endswith(".py") and not p.endswith(GENERATED))


# Decisions are pure unless they stand here: what touches the world is the exception.
SHELLS = {
    "agent": {
        *("health_socket", "sentinel", "verdicts"),
        "__init__",
        "host",
        *("intake", "job", "job_files"),
        *("metrics", "network"),
        *("nvml", "nvml_activity", "nvml_device", "nvml_events", "nvml_parts"),
        "recording",
        "ring_directory",
        "ring_reader",
        "runtime",
        "sampler",
        "spool",
        "terms",
        "uplink",
        "wall_clock",
    },
    "controller": {
        "__init__",
        "audit",
        "course_views",
        "entrance",
        *("front", "front_door", "lanes", "listener", "obedience", "own_folder", "pipes", "relay"),
        "resting",
        "gate",
        "history",
        "kept_rows",
        *("etcd_lease", "http_json", "k8s_lease", "keeper", "open_lease", "open_past"),
        *(
            "follower",
            "journal",
            "member",
            "office",
            "past_rows",
            "copies",
            "copy_mark",
            "retention",
            "standby",
            "standby_page",
            "start_up",
        ),
        "loop_lag",
        "metrics",
        "operator_service",
        "planner",
        "runtime",
        "server",
        "status_service",
        "store",
        *("store_check", "store_file"),
        "token_file",
        "views",
        *(
            "web",
            "web_acts",
            "web_answers",
            "web_data",
            "web_door",
            "web_lists",
            "web_protocol",
            "web_server",
            "web_start",
            "web_tls",
            "web_words",
        ),
        "webhook",
        "writes",
    },
}
# Where most of a folder touches the world, the pure ones stand here.
PURE = {
    "trainer": {
        *("commit", "heard", "partial_saves", "patience", "quorum", "rank_row", "token_books"),
        *("token_exchange", "token_split", "work"),
    },
    "simulator": {
        *("eplb", "lazarus", "partition_greyhound", "partition_malleus", "partition_resihp"),
    },
}


def is_pure(path: str) -> bool:
    """Must this module do without clock, randomness, I/O, threads, torch, grpc and protos?"""
    folder, _, name = path.removesuffix(".py").partition("/")
    if folder in PURE:
        return name in PURE[folder]
    return folder in ("core", "predictor") or (folder in SHELLS and name not in SHELLS[folder])
