"""The doctor's questions about keys: who is not let in where, who has another secret, who else is this node.

Pure, as `doctor` is; times are ages, so that clocks of two machines need not agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from kvcomm_p2p.units import counted, duration

RECENT_S = 120.0
"""What has not happened for longer than this is told, but stands in nobody's way."""

_Found = Iterator[tuple[Literal["ok", "note", "problem"], str, str, str]]


def secrets_on_disk(node: Mapping[str, Any], on_disk: Mapping[str, Any] | None) -> _Found:
    """What `net.key_files.look` found, and whether the node runs with the secret that is there now."""
    if on_disk is None:
        return
    for text, fix in on_disk["problems"]:
        yield "problem", text, fix, ""
    mark = on_disk["cluster_mark"]
    if mark and mark != node["cluster_mark"]:
        text = (
            f"the secret in {node['state_dir']} is another than the one that this node started with: it was exchanged"
        )
        fix = "restart this node (kvcomm keys rotate: all nodes, one after the other; peers on other machines are invited again)"
        yield "problem", text, fix, ""


def connections(node: Mapping[str, Any], later: Mapping[str, Any]) -> _Found:
    """Where others do not let us in, whom we do not let in, and frames on good connections that are not believed."""
    security = later.get("security", {"failed": (), "turned_away": (), "other_secret": ()})
    for row in security["failed"]:
        who = row["expected"] or "whoever"
        level, seen = _level(row), _times(row)
        if row["why"] == "refused":
            text = f"the node at {row['address']} ({who}) does not let this one in{seen}: we are not on its allow-list"
            yield level, text, f"there: kvcomm keys allow '{security['line']}'", row["expected"]
        else:
            text = f"whoever listens at {row['address']} does not have the key of {who}, or does not encrypt{seen}"
            fix = "write whose node it is, HOST:PORT#NAME, and compare fingerprints with it (kvcomm keys list, kvcomm keys show)"
            yield level, text, fix, row["expected"]
    for row in security["turned_away"]:
        text = f"a connection from {row['address']} was not let in{_times(row)}: its key ({row['key']}…) is not on the allow-list"
        fix = "if it is one of yours: kvcomm keys allow LINE, with the line that kvcomm keys show prints there"
        yield _level(row), text, fix, ""
    for row in security["other_secret"]:
        who = row["label"] or "somebody who was revoked"
        text = f"{who} seals with another secret{_times(row)}: it was exchanged on one side, or an invitation is older than that"
        fix = "invite again (kvcomm keys invite LINE, there kvcomm keys accept), and restart the nodes that accepted"
        yield _level(row), text, fix, row["label"]
    yield from _not_believed(node, later)


def _not_believed(node: Mapping[str, Any], later: Mapping[str, Any]) -> _Found:
    for reason, what, fix in (
        (
            "not_believed",
            "messages were about nodes that are not on this allow-list, or not signed",
            "everybody has to allow everybody: kvcomm keys list on all machines shows who is missing where",
        ),
        (
            "wrong_key",
            "messages came on a connection of another key than their sender's",
            "somebody was revoked and still talks, or a member lies: see the log, and kvcomm keys list",
        ),
        ("bad_signature", "records had signatures that are not genuine", "a broken or hostile member: see the log"),
    ):
        count = later["dropped"].get(reason, 0)
        if count:
            rising = count > node["dropped"].get(reason, 0)
            yield ("problem" if rising else "note"), f"{count:,} {what}", fix, ""


def identity(node: Mapping[str, Any]) -> _Found:
    """Whether another process is this node, too."""
    address, followed = node["stats"].get("twin", ("", False))
    if not address:
        return
    text = f"another process, at {address}, runs with the same identity and name; " + (
        "peers talk to that one and not to this" if followed else "peers talk to this one"
    )
    fix = "two machines have copies of one state directory: on one of them set KVCOMM_STATE_DIR to a new one and run "
    yield "problem", text, f"{fix}kvcomm keys new, or choose another --name", ""


def _level(row: Mapping[str, Any]) -> Literal["note", "problem"]:
    return "problem" if row["age_s"] <= RECENT_S else "note"


def _times(row: Mapping[str, Any]) -> str:
    return f" ({counted(row['count'], 'time')}, last {duration(row['age_s'])} ago)"
