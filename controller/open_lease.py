"""The store of a lease, out of its URL."""

from pacekeeper.controller.etcd_lease import EtcdLease
from pacekeeper.controller.http_json import tls_context
from pacekeeper.controller.keeper import LeaseStore
from pacekeeper.core.addresses import each_address, is_loopback
from pacekeeper.core.errors import ConfigError
from pacekeeper.core.lease_config import LeaseConfig

MOST_WAIT_S = 1.0  # for one answer


def open_lease_store(config: LeaseConfig) -> LeaseStore:
    """Raises ConfigError for a URL or certificates of no use."""
    timeout_s = min(MOST_WAIT_S, config.renew_s)
    hosts, _, key = config.url.removeprefix("etcd://").partition("/")
    try:
        addresses = each_address(hosts)
    except ValueError as error:
        raise ConfigError(f"[lease] url {config.url}: {error}") from None
    if not key:
        raise ConfigError(
            f"[lease] url {config.url}: names no key",
            remedy="as in etcd://127.0.0.1:2379/pacekeeper",
        )
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
