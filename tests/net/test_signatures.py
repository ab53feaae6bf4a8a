"""Signatures of records and heads, and what the gate lets through."""

from __future__ import annotations

import logging
import traceback
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st
from keyed_nodes import allowed
from msgspec import Struct
from msgspec.structs import replace

from kvcomm_p2p.net.gate import Gate, claims_in, verify_all
from kvcomm_p2p.net.identity import Identity, PublicIdentity, parse_line, verifies
from kvcomm_p2p.net.signatures import head_is_genuine, is_genuine, sign_head, signed_erasure, signed_record
from kvcomm_p2p.protocol.ids import ModelId, NodeId
from kvcomm_p2p.protocol.messages import Erasure, Forget, MemberRecord, Refused, RefusedReason, Welcome

ME, PEER, STRANGER = Identity.new(), Identity.new(), Identity.new()


def record(identity: Identity, name: str = "n", epoch: int = 1) -> MemberRecord:
    node_id = identity.public.node_id(name)
    return MemberRecord(node_id, epoch, name, ModelId(bytes(16)), "127.0.0.1:1", "127.0.0.1:2")


def signed(identity: Identity, name: str = "n", epoch: int = 1) -> MemberRecord:
    return signed_record(identity, record(identity, name, epoch))


def test_a_signed_record_is_genuine() -> None:
    assert is_genuine(signed(PEER))
    assert not is_genuine(record(PEER))
    with pytest.raises(ValueError, match="node id"):
        signed_record(ME, record(PEER))


@pytest.mark.parametrize("field", MemberRecord.__struct_fields__)
def test_every_field_of_a_record_is_covered(field: str) -> None:
    good = signed(PEER)
    other = replace(
        signed(STRANGER, "another", 2),
        groups=(b"g" * 8,),
        host=b"h" * 16,
        capabilities=3,
        version=9,
        control="127.0.0.9:9",
        bulk="127.0.0.9:8",
        model_id=ModelId(b"o" * 16),
    )
    changed = replace(good, **{field: getattr(other, field)})
    assert changed != good
    assert not is_genuine(changed)


@given(st.binary(max_size=64), st.binary(max_size=100))
def test_junk_is_no_signature(signature: bytes, content: bytes) -> None:
    assert not verifies(PEER.public.signing, signature, content)
    assert not verifies(signature, signature, content)


def test_heads_are_signed_in_a_domain_of_their_own() -> None:
    head = b"origin, epoch, seq, digest"
    signature = sign_head(PEER, head)
    assert head_is_genuine(PEER.public.signing, head, signature)
    assert not head_is_genuine(ME.public.signing, head, signature)
    assert not head_is_genuine(PEER.public.signing, head + b"!", signature)
    assert not verifies(PEER.public.signing, signature, head)
    assert not head_is_genuine(PEER.public.signing, head, signed(PEER).signature)


def test_erasures_are_signed_whatever_their_age() -> None:
    erasure = signed_erasure(PEER, Erasure(b"e" * 16, PEER.public.node_id("n"), 0.0, 8, bytes(8)))
    assert is_genuine(replace(erasure, age_s=99.0))
    for field, value in (("origin", b"o" * 16), ("hashes", bytes(16)), ("tokens", 4), ("anchor_ids", (b"a" * 16,))):
        assert not is_genuine(replace(erasure, **{field: value}))
    strict = gate(True)
    stranger = signed_erasure(STRANGER, erasure)
    unsigned = replace(erasure, erasure_id=b"u" * 16, public_key=b"", signature=b"")
    message = Forget((erasure, stranger, unsigned))
    strict.learn(verify_all(strict.unchecked(message)))
    assert strict.filtered(message) == Forget((erasure,))
    assert strict.unchecked(Forget((replace(erasure, age_s=5.0),))) == ()
    assert gate(False).filtered(Forget((unsigned,))) == Forget((unsigned,))


def gate(required: bool) -> Gate:
    return Gate(ME, [allowed(PEER, "peer")], required=required)


def test_only_signed_records_of_the_allowed_are_believed_where_keys_are_required() -> None:
    strict = gate(True)
    forged = replace(signed(PEER, "forged"), epoch=7)
    members = (signed(PEER), record(PEER, "unsigned"), signed(STRANGER), forged, signed(ME, "second"))
    message = Welcome(signed(PEER), members)
    unchecked = strict.unchecked(message)
    assert set(unchecked) == {signed(PEER), forged, signed(ME, "second")}
    strict.learn(verify_all(unchecked))
    kept = strict.filtered(message)
    assert isinstance(kept, Welcome)
    assert kept.members == (members[0], members[4])
    assert strict.unchecked(message) == (forged,)  # what was genuine is not checked twice
    assert strict.filtered(Welcome(signed(STRANGER), ())) is None


def test_where_keys_are_not_required_those_that_are_there_must_be_right() -> None:
    lax = gate(False)
    forged = replace(signed(PEER, "forged"), epoch=7)
    plain = MemberRecord(NodeId(bytes(16)), 1, "plain", ModelId(bytes(16)), "127.0.0.1:1", "127.0.0.1:2")
    message = Welcome(plain, (plain, forged, signed(STRANGER)))
    lax.learn(verify_all(lax.unchecked(message)))
    kept = lax.filtered(message)
    assert isinstance(kept, Welcome)
    assert kept.members == (plain, signed(STRANGER))


def test_a_node_belongs_to_the_key_of_its_record() -> None:
    strict = gate(True)
    sender, welcome = signed(PEER).node_id, Welcome(signed(PEER), ())
    refused = Refused(RefusedReason.FULL)
    assert strict.belongs(sender, welcome, PEER.public.curve)
    assert not strict.belongs(sender, welcome, ME.public.curve)
    assert not strict.belongs(sender, welcome, b"")
    assert not strict.belongs(sender, refused, PEER.public.curve)
    strict.seed("192.0.2.1:5000#peer")
    assert strict.belongs(sender, refused, PEER.public.curve)
    strict.learn([signed(PEER)])
    assert strict.belongs(sender, refused, PEER.public.curve)
    assert not strict.belongs(sender, refused, ME.public.curve)
    assert strict.set_allowed(()) == (sender,)
    assert not strict.belongs(sender, welcome, PEER.public.curve)
    assert strict.dial(sender, "192.0.2.1:5000") is None
    assert not strict.lets_in(PEER.public.curve)


def test_records_are_found_wherever_they_are() -> None:
    one, two = signed(PEER, "one"), signed(PEER, "two")
    message = _Carrier((_Item(one), _Item(None)), (1, 2), two)
    assert list(claims_in(Welcome(one, (two,)))) == [one, two]
    assert list(claims_in(message)) == [one, two]  # type: ignore[arg-type]


class _Item(Struct, frozen=True):
    member: MemberRecord | None


class _Carrier(Struct, frozen=True):
    items: tuple[_Item, ...]
    numbers: tuple[int, ...]
    last: MemberRecord


def test_lines_survive_a_round_trip_and_nothing_else_is_read() -> None:
    line = PEER.public.line("bob")
    assert parse_line(f"  {line}\n") == allowed(PEER, "bob")
    assert parse_line(line, "robert").label == "robert"
    assert len(PEER.public.fingerprint) == 19 and PEER.public.fingerprint != ME.public.fingerprint


def test_no_secret_in_reprs_logs_and_tracebacks(caplog: pytest.LogCaptureFixture) -> None:
    from kvcomm_p2p.net.curve import CurveKeys
    from kvcomm_p2p.net.invitations import Invitation
    from kvcomm_p2p.net.keys import OldSeal

    caplog.set_level(logging.DEBUG)
    shown = [
        repr(ME),
        repr(CurveKeys(ME.public.curve, ME.curve_secret, lambda key: True)),
        repr(OldSeal(b"o" * 32, 1.0)),
    ]
    shown += [repr(Invitation(ME.public, b"i" * 32)), repr(gate(True))]
    future: Future[bytes] = Future()
    try:
        signed_record(ME, record(PEER))
    except ValueError as error:
        future.set_exception(error)
        shown += traceback.format_exception(error)
        logging.getLogger("kvcomm_p2p").exception("%r %r", ME, future)
    text = "".join(shown) + caplog.text
    for secret in (ME.signing_secret, ME.curve_secret, b"o" * 32, b"i" * 32):
        for spelled in (repr(secret)[2:-1], secret.hex()):
            assert spelled not in text


def test_public_identities_compare_by_their_keys() -> None:
    assert PublicIdentity(PEER.public.signing, PEER.public.curve) == PEER.public
