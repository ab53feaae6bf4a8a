"""Why nothing is reused: looks at what nodes tell about themselves, in the order in which things go wrong, and says what to do.

Pure: `examine` takes what `watching.Watch.inspect` gave, of the node in question (twice, some seconds apart, to tell what moves
from what stands) and of the other nodes of this user on this machine, and a report where there is a prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvcomm_p2p.doctor_keys import connections, identity, secrets_on_disk
from kvcomm_p2p.explain import BY_CHOICE, REMEDIES
from kvcomm_p2p.units import counted, duration

Level = Literal["ok", "note", "problem"]
Node = Mapping[str, Any]

SUSPECT_STATES = ("suspect",)
GONE_STATES = ("dead",)

PART_NAMES = {
    "version": "the version of the identity itself (update one side)",
    "weights": "the weights",
    "kv_dtype": "the number format of the KV (--dtype)",
    "kv_shape": "the shape of the KV (another architecture)",
    "tokenizer": "the tokenizer",
    "adapter": "the adapter (LoRA)",
    "rotary": "the rotary parameters",
    "config": "the configuration that shapes KV",
}
"""What the parts of a model's identity are called for people, by `model.identity.identity_of`."""

BUSY_SHARE = 0.2
"""Of a holder's answers that may be BUSY before it is worth a word."""

_FROM = re.compile(r" from (.+)$")


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's result. `about`: the peer that it concerns, "" for the node itself; `fix`: what to do, "" for nothing."""

    check: str
    level: Level
    text: str
    fix: str = ""
    about: str = ""


def examine(
    node: Node,
    later: Node | None = None,
    others: Sequence[Node] = (),
    report: Mapping[str, Any] | None = None,
    on_disk: Mapping[str, Any] | None = None,
) -> tuple[Finding, ...]:
    """Findings in the order of checks; a check that found nothing says so once. `on_disk`: `key_files.look` at the node's state
    directory."""
    later = later or node
    findings: list[Finding] = []
    for check, found in (
        ("peers", _no_peers(later, others)),
        ("cluster key", _keys(node, later, others)),
        ("keys on disk", secrets_on_disk(later, on_disk)),
        ("connections", connections(node, later)),
        ("identity", identity(later)),
        ("protocol version", _versions(node, later, others)),
        ("model", _models(later, others)),
        ("peers' state", _states(later)),
        ("penalties", _penalties(later)),
        ("gossip", _lag(node, later)),
        ("visibility", _visibility(later, others)),
        ("directory", _directory(later)),
        ("holders", _holders(later)),
        ("approximation", _approximation(later)),
        ("own transport", _transport(node, later)),
        ("this prompt", _prompt(later, report)),
    ):
        here = [Finding(check, level, text, fix, about) for level, text, fix, about in found]
        findings += here or ([Finding(check, "ok", "nothing wrong")] if check != "this prompt" or report else [])
    return tuple(findings)


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Whether nothing was found that stands in the way of reuse."""
    return all(finding.level != "problem" for finding in findings)


_Found = Iterator[tuple[Level, str, str, str]]


def _no_peers(node: Node, others: Sequence[Node]) -> _Found:
    alive = [peer for peer in node["peers"] if peer["state"] == "alive"]
    if not node["peers"]:
        fix = f"start others with --join {node['address']}, or this one with --join and the address of one of them"
        yield "problem", "it knows no other node: there is nobody to share with", fix, ""
    elif not alive:
        text = f"of the {counted(len(node['peers']), 'node')} that it knows none is alive"
        yield "problem", text, "see below, and their own logs", ""
    known = {peer["node_id"] for peer in node["peers"]}
    for other in others:
        if other["node_id"] not in known:
            fix = f"join it: kvcomm node --name {other['name']} --join {node['address']}"
            yield "note", f"{other['name']} runs on this machine too, and neither knows the other", fix, other["name"]


def _keys(node: Node, later: Node, others: Sequence[Node]) -> _Found:
    for other in others:
        if other["cluster_mark"] != node["cluster_mark"]:
            fix = "give both the same state_dir, or the same cluster.key in it, and start one of them again"
            yield (
                "problem",
                f"{other['name']} has another cluster key: their frames are dropped unread",
                fix,
                other["name"],
            )
        elif other["cluster"] != node["cluster"]:
            text = f"{other['name']} belongs to cluster {other['cluster']!r}, this one to {node['cluster']!r}"
            yield "problem", text, "give both the same `cluster` setting", other["name"]
    bad = later["dropped"].get("bad_seal", 0)
    if bad:
        rising = bad > node["dropped"].get("bad_seal", 0)
        text = f"{counted(bad, 'frame')} came without the seal of this cluster's key" + (
            ", and more keep coming" if rising else ""
        )
        fix = "somebody with another key talks to this address: compare cluster.key in the state_dir of both"
        yield ("problem" if rising else "note"), text, fix, ""


def _versions(node: Node, later: Node, others: Sequence[Node]) -> _Found:
    for other in others:
        if other["protocol_version"] != node["protocol_version"]:
            text = f"{other['name']} speaks protocol {other['protocol_version']}, this one {node['protocol_version']}"
            yield "problem", text, "install the same version of kvcomm for both", other["name"]
    bad = later["dropped"].get("undecodable", 0)
    if bad:
        text = f"{counted(bad, 'frame')} with a good seal could not be decoded: another version of the protocol, or a broken peer"
        yield (
            "problem",
            text,
            "install the same version of kvcomm everywhere; KVCOMM_LOG_LEVEL=debug says what was wrong",
            "",
        )


def _models(node: Node, others: Sequence[Node]) -> _Found:
    here = {other["node_id"]: other for other in others}
    for peer in node["peers"]:
        if peer["model_id"] == node["model_id"] or peer["state"] == "left":
            continue
        other = here.get(peer["node_id"])
        if other is None:
            text = f"{peer['name']} runs another model; only the digest of its identity travels, so which part differs"
            text += " cannot be known from here"
            fix = f"on its machine: kvcomm doctor {peer['name']} --json, and compare `identity` with this node's"
        else:
            parts = differing(node["identity"], other["identity"])
            text = f"{peer['name']} runs another model ({other['model']}): " + (
                "different in " + ", ".join(PART_NAMES.get(part, part) for part in parts)
                if parts
                else "parts are equal"
            )
            fix = "run the same files, dtype, tokenizer and adapter on both"
        yield "problem", text, fix, peer["name"]


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Names of the parts of two identities that differ, or that one of them does not have."""
    return [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]


def _states(node: Node) -> _Found:
    for peer in node["peers"]:
        heard = duration(peer["heard_age_s"])
        if peer["state"] in GONE_STATES:
            text = f"{peer['name']} is taken for dead: nothing was heard of it for {heard}"
            yield "problem", text, "start it again, or see whether its machine can be reached", peer["name"]
        elif peer["state"] in SUSPECT_STATES:
            text = f"{peer['name']} is suspected: it did not answer (last heard {heard} ago)"
            yield (
                "problem",
                text,
                "see whether it is frozen or its machine overloaded; it clears itself if not",
                peer["name"],
            )
        elif peer["state"] == "left":
            yield "note", f"{peer['name']} has left", "", peer["name"]


def _penalties(node: Node) -> _Found:
    for peer in node["peers"]:
        if peer["penalty_s"] > 0:
            text = f"{peer['name']} failed to deliver and is not asked for another {duration(peer['penalty_s'])}"
            text += f" ({counted(peer['penalties'], 'time')} so far)"
            fix = "is it frozen, its machine overloaded, the link slow? A larger pull_stall_timeout_s waits longer"
            yield "problem", text, fix, peer["name"]
        if peer["violations"]:
            text = f"{peer['name']} broke the protocol's rules {counted(peer['violations'], 'time')}"
            yield (
                "problem",
                text,
                "a faulty or hostile node: look into it if it is yours; the log has details",
                peer["name"],
            )


def _lag(node: Node, later: Node) -> _Found:
    if later["stats"]["sharded"]:
        return  # logs are not followed then
    before = {peer["node_id"]: peer for peer in node["peers"]}
    for peer in later["peers"]:
        if peer["state"] != "alive":
            continue
        missing = peer["told_seq"] - peer["log_seq"]
        earlier = before.get(peer["node_id"], peer)
        stands = missing > 0 and peer["log_seq"] == earlier["log_seq"] and earlier["told_seq"] > earlier["log_seq"]
        if stands and later is not node:
            entries = counted(peer["told_seq"], "entry", "entries")
            text = f"{peer['name']} says that its log has {entries}; {missing:,} of them did not come"
            yield (
                "problem",
                text,
                "too much is announced for this node (see directory), or frames are lost",
                peer["name"],
            )
        elif missing > 0:
            text = f"{peer['name']} has {counted(missing, 'entry', 'entries')} more than have come here yet"
            yield "note", text, "gossip needs a moment: ask again", peer["name"]


def _visibility(node: Node, others: Sequence[Node]) -> _Found:
    rows = {peer["node_id"]: peer for peer in node["peers"]}
    for other in others:
        peer = rows.get(other["node_id"])
        if peer is None or node["stats"]["sharded"] or peer["state"] != "alive" or peer["told_seq"] > peer["log_seq"]:
            continue
        hidden = other["stats"]["pool_anchors"] - peer["anchors"]
        if hidden > 0:
            text = f"{other['name']} holds {counted(other['stats']['pool_anchors'], 'anchor')} and tells of {peer['anchors']:,}: "
            text += "the others are private, or were repaired too often to be shared"
            yield "note", text, "publish with visibility public, or group with a group that both are in", other["name"]


def _directory(node: Node) -> _Found:
    stats = node["stats"]
    alive = [peer for peer in node["peers"] if peer["state"] == "alive"]
    if stats["sharded"]:
        text = "it keeps no full index of what peers hold, but asks the owners of shards of it: a lookup costs a round trip"
        yield "note", text, "more memory for the index, if that is too slow: see the settings of the directory", ""
    elif alive and not any(peer["anchors"] for peer in alive):
        yield (
            "note",
            "no peer has announced anything yet",
            "have a peer prefill something; short prompts are not kept",
            "",
        )
    if stats["refused_deltas"]:
        text = f"news were refused {counted(stats['refused_deltas'], 'time')}: more anchors are announced than this node follows"
        yield "problem", text, "smaller pools at the peers (pool_anchors_max), or fewer peers", ""
    if stats["rejected_anchors"]:
        text = f"{counted(stats['rejected_anchors'], 'anchor')} found no room in its own pool"
        yield "problem", text, f"raise pool_bytes_max (now {node['pool_bytes_max']:,} bytes)", ""
    stale = {peer["name"]: peer["misses"].get("not_found", 0) + peer["misses"].get("evicted", 0) for peer in alive}
    for name, count in stale.items():
        if count:
            text = f"{counted(count, 'block')} of what {name} had announced could not be had any longer"
            yield "note", text, "usually nothing; if it goes on, raise pool_bytes_max there", name


def _holders(node: Node) -> _Found:
    for peer in node["peers"]:
        misses = sum(peer["misses"].values())
        if peer["busy_told"] and peer["misses"].get("busy", 0) >= max(1.0, BUSY_SHARE * misses):
            blocks = counted(peer["misses"]["busy"], "block")
            text = f"{peer['name']} was busy {counted(peer['busy_told'], 'time')}; {blocks} had to be computed instead"
            yield "note", text, "usually nothing: more holders appear by themselves", peer["name"]
        for reason in ("digest_mismatch", "length_mismatch", "tokens_mismatch"):
            if peer["misses"].get(reason):
                times = counted(peer["misses"][reason], "time")
                text = f"{times} {peer['name']} sent something else than it had announced ({reason})"
                yield "problem", text, REMEDIES[reason], peer["name"]


def _approximation(node: Node) -> _Found:
    if node["share_refusal"]:
        yield "problem", f"KV of this model cannot be shared at all: {node['share_refusal']}", "use another model", ""
    elif node["exact_only"]:
        text = f"only exact prefixes are reused: {node['exact_only']}"
        yield "problem", text, f"measure the model once: kvcomm calibrate {node['model']}", ""


def _transport(node: Node, later: Node) -> _Found:
    lost = sum(later["lost"].values())
    if lost > sum(node["lost"].values()):
        yield (
            "problem",
            f"its own transport refuses frames ({lost:,} so far)",
            "a peer reads too slowly, is frozen, or is let in no longer",
            "",
        )
    if later["failures"]:
        text = f"{later['failures']:,} internal errors were caught"
        yield "problem", text, "please report what the log says", ""
    if later["wait_lost_s"] > 1.0:
        text = f"{duration(later['wait_lost_s'])} were lost waiting for peers"
        yield "note", text, "see penalties, and misses by reason in kvcomm peers", ""


def _prompt(node: Node, report: Mapping[str, Any] | None) -> _Found:
    if report is None:
        return
    reused = sum(report[f"{kind}_tokens"] for kind in ("exact", "continued", "reused"))
    total = report["prompt_tokens"]
    if reused:
        sources = sorted({span["source"] for span in report["spans"] if span["source"]})
        yield "ok", f"{reused:,} of {total:,} tokens would come from {', '.join(sources)}", "", ""
    if not reused and not report["covered_tokens"]:
        text = f"none of its {counted(total, 'token')} stands in anything that is known here"
        fix = (
            "is it the same text, token for token, and at least 64 tokens of it? Was it prefilled by a peer, and settled? "
            "Or forgotten (kvcomm forget), in whole or in part?"
        )
        yield "problem", text, fix, ""
    blocked = _blocked(report)
    for name, (reason, detail) in blocked.items():
        level: Level = "note" if reused or reason in BY_CHOICE else "problem"
        yield level, f"{reason}: {detail}" if detail else reason, REMEDIES.get(reason, ""), name
    if reused:
        return
    for peer in node["peers"]:
        if peer["name"] not in blocked:
            reason, fix = _silent(node, peer)
            yield "note", reason, fix, peer["name"]


def _blocked(report: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Candidate -> the first reason for which something of it is not used, and its detail."""
    first: dict[str, tuple[str, str]] = {}
    for miss in report["misses"]:
        match = _FROM.search(miss["what"])
        first.setdefault(match[1] if match else miss["what"], (miss["reason"], miss["detail"]))
    for run in report["runs"]:
        for other in run["others"]:
            first.setdefault(other["source"], ("another copy was better", other["why"]))
    return first


def _silent(node: Node, peer: Mapping[str, Any]) -> tuple[str, str]:
    """Why a peer of whom the report says nothing was no candidate."""
    if peer["state"] != "alive":
        return f"it is {peer['state']}", "start it again"
    if peer["model_id"] != node["model_id"]:
        return "it runs another model", "see model"
    if peer["penalty_s"] > 0:
        return f"it is not asked for another {duration(peer['penalty_s'])}", "see penalties"
    if not peer["anchors"] and not node["stats"]["sharded"]:
        return "it has announced nothing", "have it prefill the text first"
    return (
        f"none of its {counted(peer['anchors'], 'anchor')} has a run of this prompt, or none that may be seen",
        REMEDIES["not_found"],
    )
