"""Addresses to join: what a user may write, and whose key is expected there."""

from __future__ import annotations

from typing import NamedTuple

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.settings import ANY_HOST, is_ipv4, is_loopback


class Seed(NamedTuple):
    """`address` is "host:port"; `label` the name in the allow-list of who listens there, "" where none was written."""

    address: str
    label: str


def parse_seed(text: str) -> Seed:
    """ "host:port" or "host:port#NAME". Raises ConfigError, naming the fix, for what cannot be a peer's address."""
    address, _, label = text.partition("#")
    host, colon, port = address.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()):
        raise ConfigError(f"{text!r} is not an address to join: write host:port, for example 127.0.0.1:5701")
    if not 0 < int(port) < 65536:
        raise ConfigError(f"cannot join {text!r}: the port must lie between 1 and 65535")
    if not is_ipv4(host) or host == ANY_HOST:
        raise ConfigError(f"cannot join {text!r}: write the host as an IPv4 address, for example 192.0.2.7:{port}")
    return Seed(address, label)


def check_seed(text: str, *, encrypted: bool) -> Seed:
    """`parse_seed`, and whether a node with or without encrypted connections can reach it at all. Raises ConfigError."""
    seed = parse_seed(text)
    if encrypted:
        return seed
    if seed.label:
        raise ConfigError(f"cannot join {text!r}: this node has no encrypted connections; set KVCOMM_ENCRYPT=always")
    if not is_loopback(seed.address.rpartition(":")[0]):
        raise ConfigError(
            f"cannot join {text!r}: only nodes with keys reach other machines; run `kvcomm keys new`, exchange "
            "`kvcomm keys show` lines, and set KVCOMM_BIND_HOST"
        )
    return seed
