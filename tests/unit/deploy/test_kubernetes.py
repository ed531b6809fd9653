"""The Kubernetes base: kustomize makes it, its objects fit their schemas, its parts each other."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from sqlalchemy import make_url

from pacekeeper.cli.common.lazy_group import command as main
from pacekeeper.core.config.agent import AgentConfig
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.loader import read_config
from support.tree import ROOT

kubernetes_validate = pytest.importorskip("kubernetes_validate")
yaml = pytest.importorskip("yaml")
BASE = ROOT / "deploy" / "kubernetes"
SEVERAL = ROOT / "deploy" / "kubernetes-ha"
PAGE = ROOT / "docs" / "high-availability.md"
# Custom resources: no schema of theirs comes with Kubernetes.
MONITORING = "monitoring.coreos.com/v1"
Object = dict[str, Any]


def made(folder: Path) -> list[Object]:
    """What would be applied."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("needs kubectl")
    done = subprocess.run(
        [kubectl, "kustomize", str(folder)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.safe_load_all(done.stdout) if item]


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    return made(BASE)


@pytest.fixture(scope="module")
def several() -> list[Object]:
    return made(SEVERAL)


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [item for item in objects if item["kind"] == kind]


def pod_of(objects: list[Object], kind: str) -> Object:
    (workload,) = of_kind(objects, kind)
    spec: Object = workload["spec"]["template"]["spec"]
    return spec


def test_every_object_fits_its_schema(objects: list[Object]) -> None:
    known = [item for item in objects if item["apiVersion"] != MONITORING]
    assert len(known) >= 7
    for item in known:
        kubernetes_validate.validate(item, "1.30", strict=True)
    broken = {**known[-1], "spec": {**known[-1].get("spec", {}), "replicaz": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.30", strict=True)


def test_all_objects_lie_in_one_namespace(objects: list[Object]) -> None:
    places = {item["metadata"].get("namespace") for item in objects if item["kind"] != "Namespace"}
    assert places == {"pacekeeper"}


def test_monitors_select_what_there_is(objects: list[Object]) -> None:
    (service,) = of_kind(objects, "Service")
    (of_service,) = of_kind(objects, "ServiceMonitor")
    (of_pods,) = of_kind(objects, "PodMonitor")
    (agents,) = of_kind(objects, "DaemonSet")
    wanted = of_service["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= service["metadata"]["labels"].items()
    wanted = of_pods["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= agents["spec"]["template"]["metadata"]["labels"].items()
    named = {port["name"] for port in service["spec"]["ports"]}
    assert {end["port"] for end in of_service["spec"]["endpoints"]} <= named
    (container,) = agents["spec"]["template"]["spec"]["containers"]
    named = {port["name"] for port in container["ports"]}
    assert {end["port"] for end in of_pods["spec"]["podMetricsEndpoints"]} <= named


def test_the_rules_are_those_of_the_file_for_prometheus(objects: list[Object]) -> None:
    (rule,) = of_kind(objects, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy" / "pacekeeper.alerts.yml").read_text())
    check = [sys.executable, str(ROOT / "deploy" / "prometheus_rule.py"), "--check"]
    assert subprocess.run(check, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("kind", "command"), [("Deployment", "controller"), ("DaemonSet", "agent")]
)
def test_pods_run_a_command_that_there_is_with_settings_that_are_read(
    objects: list[Object], kind: str, command: str
) -> None:
    (container,) = pod_of(objects, kind)["containers"]
    name, *options = container["args"]
    assert name == command
    found = main.get_command(click.Context(main), command)
    assert found is not None
    known = {text for option in found.params for text in option.opts}
    assert {option for option in options if option.startswith("--")} <= known
    (maps,) = [m for m in of_kind(objects, "ConfigMap") if command in m["metadata"]["name"]]
    text = maps["data"]["pacekeeper.toml"]
    config = (
        read_config(ControllerConfig, text, file="pacekeeper.toml")
        if command == "controller"
        else read_config(AgentConfig, text, file="pacekeeper.toml")
    )
    ports = {port["containerPort"] for port in container["ports"]}
    assert int(config.metrics_listen.rpartition(":")[2]) in ports
    mounted = {Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    nested = [path for path in mounted if mounted & set(path.parents)]
    assert not nested, "a runtime can make no folder in a volume that is read only"
    for file in (config.tls.ca, config.tls.cert, config.tls.key, config.metrics.cert):
        assert file and any(parent in mounted for parent in Path(file).parents), file


def test_agents_call_the_service_that_there_is(objects: list[Object]) -> None:
    (service,) = of_kind(objects, "Service")
    text = (BASE / "agent.toml").read_text()
    host, _, port = read_config(AgentConfig, text, file="agent.toml").controller.partition(":")
    assert host == f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
    assert int(port) in {p["port"] for p in service["spec"]["ports"]}


def test_no_container_has_a_right_it_does_not_need(objects: list[Object]) -> None:
    for kind in ("Deployment", "DaemonSet"):
        spec = pod_of(objects, kind)
        assert spec["automountServiceAccountToken"] is False
        (container,) = spec["containers"]
        rights = container["securityContext"]
        assert rights["capabilities"]["drop"] == ["ALL"]
        assert rights["allowPrivilegeEscalation"] is False and rights["readOnlyRootFilesystem"]
        assert not rights.get("privileged")
    assert pod_of(objects, "Deployment")["securityContext"]["runAsNonRoot"] is True


def test_the_overlay_of_two_controllers_fits_its_schemas(several: list[Object]) -> None:
    known = [item for item in several if item["apiVersion"] != MONITORING]
    kinds = {item["kind"] for item in known}
    assert {"Deployment", "PodDisruptionBudget", "NetworkPolicy"} <= kinds
    assert not {"StatefulSet", "PersistentVolumeClaim", "Role"} & kinds, "PostgreSQL has the state"
    for item in known:
        kubernetes_validate.validate(item, "1.30", strict=True)
    places = {item["metadata"].get("namespace") for item in several if item["kind"] != "Namespace"}
    assert places == {"pacekeeper"}


def test_two_controllers_share_a_database_and_have_no_right_in_the_cluster(
    several: list[Object],
) -> None:
    config = controller_of(several)
    spec = pod_of(several, "Deployment")
    (container,) = spec["containers"]
    variables = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in container["env"]}
    assert variables == {
        "PACEKEEPER_STORE": {"name": "pacekeeper-postgres", "key": "dsn"},
        "PGPASSWORD": {"name": "pacekeeper-postgres", "key": "password"},
    }
    assert container["args"][-2:] == ["--store", "$(PACEKEEPER_STORE)"]
    # The DSN that the page shows reads the file that the pod has.
    (dsn,) = re.findall(r"--from-literal=dsn='(.*?)'", PAGE.read_text())
    url = make_url(dsn)
    assert replace(config, store=dsn).is_shared
    assert url.query["sslmode"] == "verify-full" and url.password is None
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    for file in (url.query["sslrootcert"], config.audit_path):
        assert str(Path(str(file)).parent) in mounted
    assert spec["automountServiceAccountToken"] is False
    # All else is as with one controller.
    one = read_config(ControllerConfig, (BASE / "controller.toml").read_text(), file="base")
    assert replace(config, store=one.store, access=one.access) == one


def test_agents_call_a_service_of_all_controllers(several: list[Object]) -> None:
    (pods,) = of_kind(several, "Deployment")
    services = of_kind(several, "Service")
    labels = pods["spec"]["template"]["metadata"]["labels"]
    names = {service["metadata"]["name"] for service in services}
    assert names == {"pacekeeper-controller", "pacekeeper-reads"}
    for service in services:
        assert service["spec"]["selector"].items() <= labels.items()


def test_no_host_and_no_drain_takes_both_controllers(several: list[Object]) -> None:
    (budget,) = of_kind(several, "PodDisruptionBudget")
    spec = pod_of(several, "Deployment")
    (rule,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    assert rule["labelSelector"] == budget["spec"]["selector"]
    assert budget["spec"]["maxUnavailable"] == 1


def test_every_port_that_is_served_is_let_through_and_no_other(several: list[Object]) -> None:
    policies = {
        item["metadata"]["name"]: item["spec"] for item in of_kind(several, "NetworkPolicy")
    }
    assert policies["pacekeeper-deny-all"] == {
        "podSelector": {}, "policyTypes": ["Ingress", "Egress"]
    }  # fmt: skip
    for kind, name in (("Deployment", "pacekeeper-controller"), ("DaemonSet", "pacekeeper-agent")):
        (container,) = pod_of(several, kind)["containers"]
        served = {port["name"] for port in container["ports"]}
        rules = policies[name]["ingress"]
        assert {port["port"] for rule in rules for port in rule["ports"]} == served
        assert all(rule["from"] for rule in rules), "nobody unnamed"
    agents = policies["pacekeeper-agent"]["egress"]
    assert {port["port"] for rule in agents for port in rule["ports"]} == {7443, 53}


def controller_of(objects: list[Object]) -> ControllerConfig:
    (maps,) = [m for m in of_kind(objects, "ConfigMap") if "controller" in m["metadata"]["name"]]
    return read_config(ControllerConfig, maps["data"]["pacekeeper.toml"], file="pacekeeper.toml")
