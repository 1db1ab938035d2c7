"""Encryption between miners: TLS 1.3 with a certificate of this process, which only the signed handshake vouches for.

Nobody's authority is asked: the accepting side's certificate hash is part of what both hotkeys sign, so whoever sits in between,
with a certificate of his own, fails at both ends. Who opens a connection decides by the address whether it is encrypted,
and never gives in; who accepts one refuses plain ones where it would have encrypted itself.
"""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import os
import ssl
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from blake3 import blake3

from subnet.errors import AuthFailed, ConfigError

TlsMode = Literal["auto", "always", "never"]
MODES: tuple[TlsMode, ...] = ("auto", "always", "never")
CLIENT_HELLO = 0x16
"""First byte of a TLS connection; that of a plain handshake is 0, the top of a small length."""
_VALID_DAYS = 3650


class TlsRequired(AuthFailed):
    """A plain connection where an encrypted one belongs."""

    code = "tls_required"


class Security:
    """Which connections are encrypted, and with what; the certificate is made when it is needed first."""

    def __init__(self, mode: TlsMode = "auto", trusted: Sequence[str] = ()) -> None:
        if mode not in MODES:
            raise ConfigError(f"--peer.tls = {mode!r} is not allowed", hint=", ".join(MODES))
        self._mode = mode
        self._trusted = tuple(_network(text) for text in trusted)
        self._server: ssl.SSLContext | None = None
        self._client: ssl.SSLContext | None = None
        self._hash = b""

    def needed(self, host: str) -> bool:
        """Whether connections with this IP address are encrypted."""
        if self._mode != "auto":
            return self._mode == "always"
        return not (is_local(host) or self._is_trusted(host))

    @property
    def allowed(self) -> bool:
        """Whether others may encrypt."""
        return self._mode != "never"

    def _is_trusted(self, host: str) -> bool:
        address = _address(host)
        return address is not None and any(address in network for network in self._trusted)

    async def server(self) -> tuple[ssl.SSLContext, bytes]:
        """The context of the accepting side, and the hash of its certificate."""
        if self._server is None:
            self._server, self._hash = await asyncio.to_thread(_server_context)
        return self._server, self._hash

    def client(self) -> ssl.SSLContext:
        if self._client is None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE  # the handshake vouches for the certificate's hash
            self._client = context
        return self._client


def peer_certificate_hash(transport: asyncio.BaseTransport) -> bytes:
    """Of the accepting side's certificate, as the opener saw it."""
    found: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
    certificate = found.getpeercert(binary_form=True) if found is not None else None
    if not certificate:
        raise AuthFailed("the peer has shown no certificate")
    return blake3(certificate).digest()


def is_local(host: str) -> bool:
    """Whether an IP address is of this machine only."""
    address = _address(host)
    return address is not None and address.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ConfigError(f"--peer.trusted {text!r} is no network: {error}", hint="such as 10.0.0.0/8") from error


def _server_context() -> tuple[ssl.SSLContext, bytes]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "iota-peer")])
    begin = datetime.datetime(2020, 1, 1)  # nobody checks it: the handshake vouches for the certificate
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + datetime.timedelta(days=_VALID_DAYS))
        .sign(key, hashes.SHA256())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    # the library loads keys from files only: this one is readable by us alone, and gone at once
    handle, path = tempfile.mkstemp(prefix="iota-peer-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(private + certificate.public_bytes(serialization.Encoding.PEM))
        context.load_cert_chain(path)
    finally:
        Path(path).unlink()
    return context, blake3(certificate.public_bytes(serialization.Encoding.DER)).digest()
