"""The end of a certificate, read as an X.509 library reads it; anything else is said to be none."""

import base64
import datetime
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="needs pacekeeper[certs]")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from pacekeeper.core.certificates import ends_unix_s
from pacekeeper.core.prometheus_text import Page
from pacekeeper.protos import certificate_metrics


def certificate(year: int) -> tuple[str, float]:
    """PEM, and when it ends."""
    key = ec.generate_private_key(ec.SECP256R1())
    end = datetime.datetime(year, 3, 9, 11, 41, 7, tzinfo=datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "n" * 60)] * 3)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(end)
        .sign(key, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM).decode(), end.timestamp()


@pytest.mark.parametrize("year", [2026, 2049, 2050, 2120])
def test_both_forms_of_time_are_read(year: int) -> None:
    text, end = certificate(year)
    assert ends_unix_s(text) == end


def test_of_a_chain_the_first_one_counts() -> None:
    (first, end), (second, _) = certificate(2030), certificate(2040)
    assert ends_unix_s(f"somebody's words\n{first}{second}") == end


def test_what_is_damaged_is_refused_and_makes_no_other_error() -> None:
    text, _ = certificate(2030)
    der = base64.b64decode("".join(text.splitlines()[1:-1]))
    for i in range(len(der)):
        for other in (0x00, 0x80, 0x84, 0xFF, der[i] ^ 1):
            damaged = base64.b64encode(der[:i] + bytes([other]) + der[i + 1 :]).decode()
            cut = base64.b64encode(der[:i]).decode()
            for inside in (damaged, cut):
                try:
                    ends_unix_s(f"-----BEGIN CERTIFICATE-----{inside}-----END CERTIFICATE-----")
                except ValueError as error:
                    assert "no certificate" in str(error)
    for wrong in ("", "PRIVATE KEY", text.replace("M", "!", 1), text.partition("END")[0]):
        with pytest.raises(ValueError, match="no certificate"):
            ends_unix_s(wrong)


def test_prometheus_hears_when_each_file_ends_and_that_one_can_not_be_read(tmp_path: Path) -> None:
    text, end = certificate(2031)
    path = tmp_path / "node.crt"
    path.write_text(text)
    page = Page()
    certificate_metrics.write(page, {"tls": str(path), "metrics": str(tmp_path / "no"), "ca": ""})
    lines = [line for line in page.text().splitlines() if not line.startswith("#")]
    assert [line.split("{")[1] for line in lines] == [
        f'use="tls"}} {end}',
        'use="metrics"} 0.0',
    ]
