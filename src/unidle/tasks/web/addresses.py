"""The allow-list of hosts and addresses. Everything else is refused before any packet is sent.

A name that is not listed is not even resolved. A listed name may resolve to public addresses only: 127.0.0.1 or
10.0.0.5 (DNS rebinding) is refused, unless that address is listed too. So only what is on the list can be reached:

    (empty)                          loopback: 127.0.0.0/8, ::1, localhost
    example.org                      that name, on any port, at public addresses
    *.example.org                    all names below it
    127.0.0.1:8000, [::1]:8000       that address, on that port only
    intranet.local, 10.0.0.0/8       that name, also at those addresses, and the addresses themselves
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from unidle.errors import UsageError

Address = IPv4Address | IPv6Address

# Public addresses are in 2000::/3, except protocol assignments and Teredo, documentation, 6to4.
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_NOT_PUBLIC = [IPv6Network(net) for net in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")]
_NAT64 = IPv6Network("64:ff9b::/96")  # an IPv4 address in its last four bytes
_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
# Numeric forms that inet_aton accepts as addresses (2130706433, 127.1, 0x7f.0.0.1); they cannot be listed.
_NUMERIC = re.compile(r"(.*\.)?(0x[0-9a-f]*|[0-9]+)")


class RefusedError(OSError):
    """Not on the allow-list; nothing was sent. An OSError, so that aiohttp's connector passes it on unchanged."""


@dataclass(frozen=True)
class Entry:
    """One entry of the allow-list."""

    host: str  # a name, `*.` and a domain, or "" if `network` is set
    network: IPv4Network | IPv6Network | None
    port: int | None  # None: any

    @staticmethod
    def of(text: str) -> Entry:
        """Parse an entry; UsageError if it is not a host."""
        plain = text.strip().lower()
        host, port = plain, None
        split = re.fullmatch(r"(\[[^]]*\]|[^:]*):([0-9]{1,5})", plain)
        if split:
            host, port = split[1], int(split[2])
        host = host.strip("[]").rstrip(".")
        with contextlib.suppress(ValueError):
            network = ip_network(host, strict=False)
            return Entry("", network, port)
        with contextlib.suppress(UnicodeError):
            host = host.encode("idna").decode()
        if not _NAME.fullmatch(host.removeprefix("*.")) or _NUMERIC.fullmatch(host) or (port or 0) > 65535:
            raise UsageError(
                f"`{text}` in hosts is not a host; write a name, *.name, an address or a network, optionally with "
                ":port, and without http://."
            )
        return Entry(host, None, port)

    def matches_name(self, name: str, port: int) -> bool:
        """Whether the entry allows this name."""
        listed = name.endswith(self.host[1:]) if self.host.startswith("*.") else name == self.host
        return self.network is None and listed and self.port in (None, port)

    def matches_address(self, address: Address, port: int) -> bool:
        """Whether the entry allows this address."""
        return self.network is not None and address in self.network and self.port in (None, port)


@dataclass(frozen=True)
class AllowList:
    """Everything that may be reached."""

    entries: tuple[Entry, ...]

    @staticmethod
    def of(hosts: Sequence[str]) -> AllowList:
        """Parse a list; UsageError if an entry is not a host."""
        return AllowList(tuple(Entry.of(host) for host in hosts))

    def check_host(self, host: str, port: int) -> None:
        """Refuse the host of a URL unless it is listed; a listed name may be resolved."""
        host = host.lower().rstrip(".")
        address = parse_ip(host)
        if address is not None:
            if not self._lists(address, port):
                raise RefusedError(f"{host}:{port} is not in the list of allowed hosts")
            return
        named = [entry for entry in self.entries if entry.matches_name(host, port)]
        listed = named or (not self.entries and host == "localhost")
        if not listed:
            raise RefusedError(f"{host}:{port} is not in the list of allowed hosts")

    def check_resolved(self, host: str, port: int, answer: str) -> None:
        """Refuse a resolved address of a listed name unless it is public or listed itself."""
        address = parse_ip(answer)
        if address is None:
            raise RefusedError(f"{host} resolves to {answer}, which is not an address")
        own = host.lower().rstrip(".") == "localhost" and unmap_ipv4(address).is_loopback
        if not (own or self._lists(address, port) or (self.entries and is_public(address))):
            raise RefusedError(f"{host} resolves to {answer}, which is neither public nor allowed")

    def _lists(self, address: Address, port: int) -> bool:
        address = unmap_ipv4(address)
        if _is_scoped(address):
            return False
        if not self.entries:
            return address.is_loopback
        return any(entry.matches_address(address, port) for entry in self.entries)


@lru_cache(1024)
def parse_ip(host: str) -> Address | None:
    """Parse a host as an address; None if it is a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def unmap_ipv4(address: Address) -> Address:
    """The IPv4 address of an IPv4-mapped IPv6 address; others unchanged."""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address if mapped is None else mapped


def is_public(address: Address) -> bool:
    """Whether it is a public internet address: not private, loopback, link-local, multicast, reserved, …"""
    address = unmap_ipv4(address)
    if isinstance(address, IPv6Address) and address in _NAT64:
        address = IPv4Address(int(address) & 0xFFFFFFFF)
    if isinstance(address, IPv4Address):
        return address.is_global and not (address.is_multicast or address.is_reserved)
    is_unicast = address in _GLOBAL_UNICAST and not any(address in net for net in _NOT_PUBLIC)
    return is_unicast and not _is_scoped(address)


def _is_scoped(address: Address) -> bool:
    """Whether it is bound to one network interface, as fe80::1%eth0."""
    return isinstance(address, IPv6Address) and address.scope_id is not None
