"""Generates `kubernetes/prometheus-rule.yaml` from the alert rules; `--check` compares them.

The lines of `pacekeeper.alerts.yml` are copied and indented, not parsed.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RULES = HERE / "pacekeeper.alerts.yml"
TARGET = HERE / "kubernetes" / "prometheus-rule.yaml"
HEAD = """\
# Made from pacekeeper.alerts.yml by `python deploy/prometheus_rule.py`; do not edit.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: pacekeeper
spec:
"""


def made() -> str:
    """The file's content."""
    lines = [line for line in RULES.read_text().splitlines() if not line.startswith("#")]
    return HEAD + "".join(f"  {line}".rstrip() + "\n" for line in lines)


def main() -> int:
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(made())
        return 0
    if TARGET.exists() and TARGET.read_text() == made():
        return 0
    print(f"{TARGET.name} is not current: python deploy/prometheus_rule.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
