"""The sender of a call: address, authorization headers, names in the certificate.

The ingest process sends the identity of an agent to the controller with its first message. Nothing
here decides whether an identity is valid (`authenticator.py`).
"""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerIdentity:
    """The sender of a call, as its connection and headers show it.

    Attributes:
        peer: gRPC's name of the peer, such as ipv4:192.0.2.1:5000.
        authorization: Values of its authorization headers.
        has_certificate: Whether the TLS client sent a certificate.
        uris: URIs among the certificate's subject alternative names.
        names: DNS names among them.
    """

    peer: str
    authorization: tuple[str, ...] = ()
    has_certificate: bool = False
    uris: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        """Encode for a frame."""
        fields = (self.peer, self.authorization, self.has_certificate, self.uris, self.names)
        return json.dumps(fields).encode()


def decode_peer_identity(data: bytes) -> PeerIdentity:
    """Decode the bytes of `PeerIdentity.to_bytes`. Raises ValueError for anything else."""
    try:
        peer, authorization, has_certificate, uris, names = json.loads(data)
        return PeerIdentity(
            peer=peer,
            authorization=tuple(authorization),
            has_certificate=has_certificate,
            uris=tuple(uris),
            names=tuple(names),
        )
    except (TypeError, ValueError) as error:
        raise ValueError("the identity of the peer cannot be decoded") from error


def peer_identity(context: Any) -> PeerIdentity:
    """The sender of a call, by its connection and headers.

    Args:
        context: The gRPC context.
    """
    metadata = context.invocation_metadata() or ()
    shown = context.auth_context()
    uris, names = (
        tuple(bytes(value).decode(errors="replace") for value in shown.get(kind, ()))
        for kind in ("peer_uri", "peer_dns")
    )
    return PeerIdentity(
        peer=context.peer(),
        authorization=tuple(
            value if isinstance(value, str) else ""
            for name, value in metadata
            if name.lower() == "authorization"
        ),
        has_certificate=bool(shown.get("x509_pem_cert")),
        uris=uris,
        names=names,
    )


def host_of(peer: str) -> str:
    """The host in gRPC's name of a peer: ipv4:192.0.2.1:5000 -> ipv4:192.0.2.1."""
    return peer.rpartition(":")[0] or peer
