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
        *("health/nvrx_socket", "health/nvsentinel", "health/node_health"),
        "__init__",
        "host/kernel",
        *("rings/collector", "rings/job_state", "rings/job_files"),
        *("metrics", "host/network"),
        *("nvml/client", "nvml/gpm", "nvml/device", "nvml/xid_events", "nvml/nvml_parts"),
        "trace_recorder",
        "rings/directory",
        "rings/reader",
        "daemon",
        "nvml/sampler",
        "uplink/spool",
        "uplink/fencing",
        "uplink/stream",
        "host/wall_clock",
    },
    "controller": {
        "__init__",
        "api/auth/audit_log",
        "api/course_views",
        "api/auth/listeners",
        *(
            "ingest/worker",
            "ingest/supervisor",
            "ingest/http2/agent_stream",
            "ingest/http2/listener",
            "effects",
            "ingest/runtime_dir",
            "ingest/http2/pipes",
            "ingest/http2/proxy",
        ),
        "ingest/http2/batching_selector",
        "api/auth/interceptor",
        "observability/timeline_writer",
        "storage/history_tables",
        *(
            "ha/etcd",
            "ha/http_client",
            "ha/kubernetes",
            "ha/lease_renewer",
            "ha/backends",
            "storage/open_past",
        ),
        *(
            "ha/replica",
            "ha/change_log",
            "ha/leader_election",
            "ha/leadership",
            "storage/past_rows",
            "ha/replication_server",
            "ha/copy_mark",
            "storage/retention",
            "ha/standby",
            "ha/standby_server",
            "start_up",
        ),
        "observability/event_loop_lag",
        "observability/metrics",
        "api/operator_service",
        "planner",
        "app",
        "ingest/agent_service",
        "api/status_service",
        "storage/store",
        *("storage/integrity", "storage/sqlite_file"),
        "api/auth/token_file",
        "api/messages",
        *(
            "api/web/app",
            "api/web/actions",
            "api/web/responses",
            "api/web/queries",
            "api/web/auth",
            "api/web/web_lists",
            "api/web/web_protocol",
            "api/web/server",
            "api/web/web_start",
            "api/web/web_tls",
            "api/web/filters",
        ),
        "observability/webhook",
        "storage/write_batch",
    },
}
# Where most of a folder touches the world, the pure ones stand here.
PURE = {
    "trainer": {
        *(
            "elastic/two_phase_commit",
            "elastic/heard",
            "checkpoint/policies/partial_experts",
            "elastic/patience",
            "elastic/quorum",
            "parallel/rank_row",
            "checkpoint/policies/token_books",
        ),
        *("parallel/all_to_all_splits", "parallel/token_balancing", "model/flop_counter"),
    },
    "simulator": {
        *(
            "baselines/eplb",
            "baselines/lazarus",
            "baselines/greyhound",
            "baselines/malleus",
            "baselines/resihp",
            "baselines/even_pipelines",
            "baselines/initial_partition",
            "baselines/resihp_migration",
            "baselines/step_simulation",
        ),
    },
}


def is_pure(path: str) -> bool:
    """Must this module do without clock, randomness, I/O, threads, torch, grpc and protos?"""
    folder, _, name = path.removesuffix(".py").partition("/")
    if folder in PURE:
        return name in PURE[folder]
    return folder in ("core", "predictor") or (folder in SHELLS and name not in SHELLS[folder])
