"""Certificates and keys of a federation: one authority, one server certificate, one key pair per site.

The server proves itself by a certificate of the federation's own authority (TLS); a site proves itself by its
key (a signature on every request), whose public half the server has.
"""

from __future__ import annotations

import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fed_dp.errors import ConfigError, DeployError

Key = ec.EllipticCurvePrivateKey
SOON = timedelta(days=30)  # before a certificate ends, checks warn


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, from its first byte on; never replace one."""
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as out:
        out.write(content)


def make_authority(folder: Path, *, days: int) -> None:
    """Make the federation's own certificate authority, which can sign nothing but its servers."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fed_dp federation authority")])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    certificate = (
        _builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    write_secret(folder / "ca.key", _private_pem(key))
    (folder / "ca.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def issue_server(authority: Path, folder: Path, *, hosts: list[str], days: int) -> None:
    """Issue a server's certificate for these names and addresses."""
    signer = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
    assert isinstance(signer, Key)
    issuer = read_certificate(authority / "ca.crt")
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    certificate = (
        _builder(name, issuer.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(identifier, critical=False)
        .add_extension(x509.SubjectAlternativeName([_general(host) for host in hosts]), critical=False)
        .sign(signer, hashes.SHA384())
    )
    write_secret(folder / "server.key", _private_pem(key))
    (folder / "server.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def make_site_key(secret: Path, public: Path) -> None:
    """Make a site's key pair, in the format that Flower reads (NIST curve, OpenSSH)."""
    key = ec.generate_private_key(ec.SECP384R1())
    encoding, none = serialization.Encoding, serialization.NoEncryption()
    write_secret(secret, key.private_bytes(encoding.PEM, serialization.PrivateFormat.OpenSSH, none))
    public.write_bytes(
        key.public_key().public_bytes(encoding.OpenSSH, serialization.PublicFormat.OpenSSH) + b"\n"
    )


def public_bytes(path: Path) -> bytes:
    """Read a site's public key, as Flower identifies it."""
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is not a public key: {error}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(f"{path}: expected a key on a NIST curve (ecdsa), which Flower asks for")
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_bytes(serialization.Encoding.PEM, form)


def check_site_key(path: Path) -> None:
    """Refuse a private key that is missing, readable by others, or none that Flower takes."""
    try:
        mode, content = path.stat().st_mode, path.read_bytes()
        key = serialization.load_ssh_private_key(content, None)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise DeployError(f"{path} is not this site's private key: {error}") from None
    if not isinstance(key, Key):
        raise DeployError(f"{path}: expected a key on a NIST curve (ecdsa), which Flower asks for")
    if mode & 0o077:
        raise DeployError(f"{path} can be read by others (mode {mode & 0o777:o}): chmod 600 {path}")


def read_certificate(path: Path) -> x509.Certificate:
    """Read a certificate."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DeployError(f"{path} is not a certificate: {error}") from None


def check_dates(certificate: x509.Certificate, what: str, *, now: datetime | None = None) -> str | None:
    """Refuse a certificate that is not valid now; return a warning if it soon is not."""
    now = now or datetime.now(UTC)
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > last:
        raise DeployError(
            f"{what} expired on {last:%Y-%m-%d %H:%M} UTC: the operator issues a new one with: fed-dp deploy "
            "renew"
        )
    if now < first:
        raise DeployError(
            f"{what} is valid from {first:%Y-%m-%d %H:%M} UTC on, and it is {now:%Y-%m-%d %H:%M}: is the "
            "clock right?"
        )
    return f"{what} expires on {last:%Y-%m-%d}" if now + SOON > last else None


def check_issued(certificate: x509.Certificate, authority: x509.Certificate, what: str) -> None:
    """Refuse a certificate that another authority issued."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        raise DeployError(
            f"{what} was not issued by this federation's authority (ca.crt): it is another federation's "
            "server, or the ca.crt here is another's"
        ) from None


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + timedelta(days=days))
    )


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private_pem(key: Key) -> bytes:
    encoding, none = serialization.Encoding.PEM, serialization.NoEncryption()
    return key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, none)
