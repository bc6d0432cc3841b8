"""Certificates for tests: a CA, a valid certificate of this machine, and invalid ones.

Unit tests and real daemons use files in the same format as the files of an operator.
"""

from pathlib import Path
from typing import NamedTuple

import trustme

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


class Certificates(NamedTuple):
    """PEM files of one authority; `key` is in a separate file."""

    authorities: str
    certificate: str
    key: str

    @property
    def settings(self) -> dict[str, object]:
        """The settings of a process that presents the certificate and trusts the authority."""
        return {
            "tls": "on",
            "tls_certificate": self.certificate,
            "tls_key": self.key,
            "tls_authorities": self.authorities,
        }


def create_certificates(
    directory: Path, *, name: str = "ours", hosts: tuple[str, ...] = LOCAL_HOSTS
) -> Certificates:
    """Write the files of a new authority, and of a certificate for some hosts."""
    authority = trustme.CA()
    issued = authority.issue_cert(*hosts)
    certificates = Certificates(
        *(str(directory / f"{name}-{each}.pem") for each in ("ca", "cert", "key"))
    )
    authority.cert_pem.write_to_path(certificates.authorities)
    issued.private_key_pem.write_to_path(certificates.key)
    for part in issued.cert_chain_pems:
        part.write_to_path(certificates.certificate, append=True)
    return certificates
