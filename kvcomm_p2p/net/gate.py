"""Which records, senders and connections are believed.

Where connections are encrypted (`required`), every record must be signed by an identity on the allow-list, and a frame counts
only if it came on a connection of the identity whose node sent it. Elsewhere records need no keys, but those that have keys
must be genuine. Lives on the driver's loop, except where said.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.net.curve import CurveKeys, dial_name, split_dial_name
from kvcomm_p2p.net.identity import Allowed, Identity, PublicIdentity, load_allowed, load_identity
from kvcomm_p2p.net.seeds import check_seed
from kvcomm_p2p.net.signatures import Claim, is_genuine
from kvcomm_p2p.net.troubles import Troubles
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.messages import Erasure, Hello, MemberRecord, Message, Refused, Welcome
from kvcomm_p2p.settings import is_loopback

NODES_REMEMBERED_MAX = 8192
"""Genuine records that need not be checked again, and the keys of their nodes; the oldest are forgotten first."""

SEEDS_REMEMBERED_MAX = 1024

log = logging.getLogger("kvcomm_p2p.net")

OWN_LABEL = "me"
"""Behind "#" in a seed: a node of this identity."""


class Gate:
    """Without arguments: nothing is required, nothing is signed."""

    def __init__(
        self,
        identity: Identity | None = None,
        allowed: Iterable[Allowed] = (),
        *,
        required: bool = False,
        own_hosts: Iterable[str] = (),
    ) -> None:
        """`own_hosts`: addresses of this machine. Raises ValueError if keys are required and there is no identity."""
        if required and identity is None:
            raise ValueError("nobody can be let in without an identity of our own")
        self.identity = identity
        self.required = required
        self.troubles = Troubles()
        self._own_hosts = frozenset(own_hosts)
        self._own: tuple[Allowed, ...] = () if identity is None else (Allowed("", identity.public),)
        self._genuine: OrderedDict[Claim, None] = OrderedDict()
        self._owners: OrderedDict[NodeId, PublicIdentity] = OrderedDict()
        self._seed_keys: OrderedDict[str, bytes] = OrderedDict()
        self._saved_keys: dict[str, deque[bytes]] = {}
        self._revoked: OrderedDict[bytes, str] = OrderedDict()
        self._allowed: tuple[Allowed, ...] = ()
        self.set_allowed(allowed)

    def set_allowed(self, allowed: Iterable[Allowed]) -> tuple[NodeId, ...]:
        """The allow-list as it is now. Returns the nodes that were known and are let in no longer, ascending."""
        before, self._allowed = self._allowed, tuple(allowed)
        everybody = (*self._own, *self._allowed)
        self._let_in = frozenset(peer.public for peer in everybody)
        self._signing_keys = frozenset(peer.public.signing for peer in everybody)
        self._curve_keys = frozenset(peer.public.curve for peer in everybody)
        for peer in before:
            if peer.public.curve not in self._curve_keys:
                _remember(self._revoked, peer.public.curve, peer.label, NODES_REMEMBERED_MAX)
        if not self.required:
            return ()
        gone = sorted(node for node, owner in self._owners.items() if owner not in self._let_in)
        for node in gone:
            del self._owners[node]
        for claim in [claim for claim in self._genuine if not self._plausible(claim)]:
            del self._genuine[claim]
        for address in [address for address, key in self._seed_keys.items() if key not in self._curve_keys]:
            del self._seed_keys[address]
        return tuple(gone)

    def remember(self, addresses: Sequence[str], keys: Sequence[bytes]) -> None:
        """Where nodes with these CURVE keys listened when this node ran last (b"": not known whose)."""
        for address, key in zip(addresses, keys, strict=True):
            if key:
                self._saved_keys.setdefault(address, deque()).append(key)

    def lets_in(self, curve_key: bytes) -> bool:
        """Whether a connection of this key may be made, and may still be used."""
        return curve_key in self._curve_keys

    def turn_away(self, address: str, curve_key: bytes) -> None:
        """A connection of this key was not let in. Logged once for a peer that was revoked while this node runs, each time that
        it is revoked: strangers, who can make up as many keys as they like, are only counted."""
        self.troubles.turned_away.add((address, curve_key))
        label = self._revoked.pop(curve_key, None)
        if label is not None and not self.lets_in(curve_key):
            log.info(
                "turned away %s at %s, which was revoked; further attempts are counted, not logged", label, address
            )

    def label_of(self, curve_key: bytes) -> str:
        """What the owner of a CURVE key is called in the allow-list; OWN_LABEL for us, "" for strangers."""
        if any(own.public.curve == curve_key for own in self._own):
            return OWN_LABEL
        return next((peer.label for peer in self._allowed if peer.public.curve == curve_key), "")

    def view(self) -> dict[str, Any]:
        """What people may want to know, plain types; no secret."""
        troubles = self.troubles
        names = [(split_dial_name(name), why, seen) for (name, why), seen in troubles.failed.rows()]
        return {
            "encrypted": self.required,
            "line": "" if self.identity is None else self.identity.public.line(),
            "allowed": [peer.label for peer in self._allowed],
            "turned_away": [
                {"address": address, "key": key.hex()[:16], **seen}
                for (address, key), seen in troubles.turned_away.rows()
                if not self.lets_in(key)
            ],
            "failed": [
                {"address": address, "expected": self.label_of(key), "why": why, **seen}
                for (address, key), why, seen in names
            ],
            "other_secret": [{"label": self.label_of(key), **seen} for key, seen in troubles.other_secret.rows()],
        }

    # ----------------------------------------------------------------------------------------------------------- sending

    def seed(self, text: str) -> str:
        """The "host:port" of a seed; remembers whose key is expected there.

        That is the key of the peer named behind "#"; without a name our own on addresses of this machine and where nobody
        else is allowed, otherwise that of the only peer in the allow-list. Raises ConfigError, naming the fix.
        """
        seed = check_seed(text, encrypted=self.required)
        if not self.required:
            return seed.address
        _remember(self._seed_keys, seed.address, self._seed_key(text, *seed), SEEDS_REMEMBERED_MAX)
        return seed.address

    def _seed_key(self, text: str, address: str, label: str) -> bytes:
        key = b"" if label else self._likely_key(address)
        if label == OWN_LABEL:
            key = self._own[0].public.curve
        for peer in self._allowed:
            if label and peer.label == label:
                key = peer.public.curve
        if key:
            return key
        names = ", ".join(sorted(peer.label for peer in self._allowed))
        wrong = f"{label!r} is not in `kvcomm keys list`; " if label else ""
        raise ConfigError(
            f"cannot join {text!r}: {wrong}write whose node it is, {address}#NAME; allowed are {names} and {OWN_LABEL}"
        )

    def _likely_key(self, address: str) -> bytes:
        """Whose key is expected at an address of which nothing is known; empty if there are several."""
        host = address.rpartition(":")[0]
        if not self._allowed or is_loopback(host) or host in self._own_hosts:
            return self._own[0].public.curve
        return self._allowed[0].public.curve if len(self._allowed) == 1 else b""

    def dial(self, to: NodeId | None, address: str) -> str | None:
        """What the transport is to be given to reach node `to` (None: a seed) at `address`. None: whose key is to be expected
        there is not known, or not allowed any longer."""
        if not self.required:
            return address
        owner = None if to is None else self._owners.get(to)
        if to is None:
            key = self._seed_keys.get(address) or self._saved_key(address) or self._likely_key(address)
        else:
            key = b"" if owner is None else owner.curve
        return dial_name(address, key) if key and self.lets_in(key) else None

    def _saved_key(self, address: str) -> bytes:
        """Of several that claimed an address when this node ran last, each in its turn: one of them may have lied."""
        keys = self._saved_keys.get(address, deque())
        for _ in range(len(keys)):
            keys.rotate(-1)
            if self.lets_in(keys[-1]):
                return keys[-1]
        return b""

    # --------------------------------------------------------------------------------------------------------- receiving

    def belongs(self, sender: NodeId, message: Message, key: bytes) -> bool:
        """Whether a message of `sender` may have come on a connection of `key`. Of nodes that are not known yet only
        introductions are taken (their record says whose they are), and refusals of a seed."""
        if not self.required:
            return True
        if not self.lets_in(key):
            return False
        owner = self._owners.get(sender)
        if owner is not None:
            return owner.curve == key
        if isinstance(message, Hello | Welcome):
            return message.member.node_id == sender and message.member.curve_key == key
        return isinstance(message, Refused) and (
            key in self._seed_keys.values() or any(key in keys for keys in self._saved_keys.values())
        )

    def is_of(self, node: NodeId, key: bytes) -> bool:
        """Whether this is known to be a node of that CURVE key."""
        owner = self._owners.get(node)
        return owner is not None and owner.curve == key

    def curve_key_of(self, node: NodeId) -> bytes:
        """The CURVE key of a node whose record was genuine, empty if there was none."""
        owner = self._owners.get(node)
        return b"" if owner is None else owner.curve

    def key_of(self, node: NodeId) -> bytes:
        """The Ed25519 key of a node whose record was genuine, empty if there was none."""
        owner = self._owners.get(node)
        return b"" if owner is None else owner.signing

    def unchecked(self, message: Message) -> tuple[Claim, ...]:
        """Records and erasures in a message whose signature has to be verified (`is_genuine`, from any thread) before
        `filtered`."""
        return tuple(
            c for c in claims_in(message) if self._plausible(c) and c.public_key and _ageless(c) not in self._genuine
        )

    def learn(self, claims: Iterable[Claim]) -> None:
        """These were found to be genuine."""
        for claim in claims:
            if not self._plausible(claim):
                continue
            _remember(self._genuine, _ageless(claim), None, NODES_REMEMBERED_MAX)
            if isinstance(claim, MemberRecord):
                owner = PublicIdentity(claim.public_key, claim.curve_key)
                _remember(self._owners, claim.node_id, owner, NODES_REMEMBERED_MAX)

    def filtered(self, message: Message) -> Message | None:
        """The message without records and erasures that are not believed; None if it is about such a record as a whole."""
        fields: dict[str, Any] = {}
        for name in message.__struct_fields__:
            value = getattr(message, name)
            if isinstance(value, MemberRecord):
                if not self._believed(value):
                    return None
            elif isinstance(value, tuple) and value and isinstance(value[0], Struct):
                kept = tuple(item for item in value if (claim := _claim_of(item)) is None or self._believed(claim))
                if len(kept) != len(value):
                    fields[name] = kept
        return replace(message, **fields) if fields else message

    def _plausible(self, claim: Claim) -> bool:
        """All but the signature."""
        if not self.required:
            return True
        if isinstance(claim, Erasure):
            return claim.public_key in self._signing_keys
        return PublicIdentity(claim.public_key, claim.curve_key) in self._let_in

    def _believed(self, claim: Claim) -> bool:
        return self._plausible(claim) and (not claim.public_key or _ageless(claim) in self._genuine)


def claims_in(message: Message) -> Iterator[Claim]:
    """Records and erasures that a message carries, alone, in a tuple, or as the `member` of what is in a tuple."""
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if isinstance(value, MemberRecord):
            yield value
        elif isinstance(value, tuple) and value and isinstance(value[0], Struct):
            yield from (claim for item in value if (claim := _claim_of(item)) is not None)


def verify_all(claims: Iterable[Claim]) -> list[Claim]:
    """Those that are genuine (158 us each). Any thread."""
    return [claim for claim in claims if is_genuine(claim)]


def _claim_of(item: Any) -> Claim | None:
    if isinstance(item, MemberRecord | Erasure):
        return item
    member = getattr(item, "member", None)
    return member if isinstance(member, MemberRecord) else None


def _ageless(claim: Claim) -> Claim:
    """The same claim is told at several ages."""
    return replace(claim, age_s=0.0) if isinstance(claim, Erasure) else claim


def _remember(table: OrderedDict[Any, Any], key: Any, value: Any, entries_max: int) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > entries_max:
        table.popitem(last=False)


def open_gate(state_dir: Path, bind_host: str, *, encrypted: bool, advertise_host: str = "") -> Gate:
    """The gate of a node of `state_dir`. Raises ConfigError, naming the commands, where connections are to be encrypted and
    there is no identity to encrypt with, or nobody to talk to."""
    identity = load_identity(state_dir)
    if not encrypted:
        return Gate(identity)
    exchange = "`kvcomm keys allow LINE` with the line that `kvcomm keys show` prints for each of your peers"
    if identity is None:
        raise ConfigError(
            f"a node at {bind_host} needs keys, since its connections are encrypted: run `kvcomm keys new`, then {exchange}"
        )
    allowed = load_allowed(state_dir)
    if not allowed and not is_loopback(bind_host):
        raise ConfigError(f"nobody may connect to a node at {bind_host}: run {exchange}")
    return Gate(identity, allowed, required=True, own_hosts=(bind_host, advertise_host))


def curve_keys(gate: Gate) -> CurveKeys | None:
    """What a transport needs to encrypt for this gate; None where connections are plain."""
    if not gate.required or gate.identity is None:
        return None
    return CurveKeys(
        gate.identity.public.curve,
        gate.identity.curve_secret,
        gate.lets_in,
        gate.turn_away,
        gate.troubles.lost,
    )
