"""The store of a lease, out of its URL."""

import os
import re
from pathlib import Path

from pacekeeper.controller.ha.etcd import EtcdLease
from pacekeeper.controller.ha.http_client import tls_context
from pacekeeper.controller.ha.kubernetes import KubernetesLease
from pacekeeper.controller.ha.lease_renewer import LeaseStore
from pacekeeper.core.addresses import is_loopback, join_address, split_addresses
from pacekeeper.core.config.controller import LeaseConfig
from pacekeeper.core.errors import ConfigError

MOST_WAIT_S = 1.0  # for one answer
POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


def open_lease_store(config: LeaseConfig) -> LeaseStore:
    """Raises ConfigError for a URL or certificates of no use."""
    kind, _, place = config.url.partition("://")
    return _etcd(config, place) if kind == "etcd" else _kubernetes(config, place)


def _etcd(config: LeaseConfig, place: str) -> EtcdLease:
    hosts, _, key = place.partition("/")
    try:
        addresses = split_addresses(hosts)
    except ValueError as error:
        raise ConfigError(f"[lease] url {config.url}: {error}") from None
    if not key:
        raise ConfigError(
            f"[lease] url {config.url}: names no key",
            remedy="as in etcd://127.0.0.1:2379/pacekeeper",
        )
    timeout_s = _timeout_s(config)
    if config.ca:
        context = tls_context(config.ca, config.cert, config.key)
        urls = tuple(f"https://{address}" for address in addresses)
        return EtcdLease(urls, key, timeout_s=timeout_s, context=context)
    if not all(is_loopback(address) for address in addresses):
        raise ConfigError(
            f"[lease] url {config.url}: whoever changes that key says who commands, and the way "
            "there is not encrypted",
            remedy="set [lease] ca",
        )
    return EtcdLease(tuple(f"http://{address}" for address in addresses), key, timeout_s=timeout_s)


def _kubernetes(config: LeaseConfig, place: str) -> KubernetesLease:
    namespace, _, name = place.partition("/")
    if not _LABEL.fullmatch(namespace) or not _LABEL.fullmatch(name):
        raise ConfigError(
            f"[lease] url {config.url}: expected the names of a namespace and a Lease",
            remedy="as in k8s://pacekeeper/controller",
        )
    api = config.api
    if not api:
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{x}", "") for x in ("HOST", "PORT"))
        if not host or not port.isdigit():
            raise ConfigError(
                f"[lease] url {config.url}: this is no pod", remedy="name the API: [lease] api"
            )
        api = f"https://{join_address(host, int(port))}"
    if not api.startswith("https://"):
        raise ConfigError(f"[lease] api: expected https://HOST:PORT, got {api!r}")
    return KubernetesLease(
        api.rstrip("/"),
        namespace,
        name,
        token_file=Path(config.token_file) if config.token_file else POD / "token",
        context=tls_context(config.ca or str(POD / "ca.crt"), config.cert, config.key),
        timeout_s=_timeout_s(config),
    )


def _timeout_s(config: LeaseConfig) -> float:
    return min(MOST_WAIT_S, config.renew_s)
