"""The certificate that browsers are shown: none is asked of them."""

import ssl

from pacekeeper.core.config.security import TlsConfig
from pacekeeper.core.errors import ConfigError


def page_context(tls: TlsConfig) -> ssl.SSLContext:
    """Raises ConfigError for files that are no pair, or not there."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(tls.cert, tls.key, password="")
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", None) or str(error)
        raise ConfigError(f"{tls.cert}, {tls.key}: no certificate with its key: {why}") from None
    return context
