"""Every cause is found, named with its fix, and told from the others."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from harness import Kvcomm

from kvcomm_p2p.cli.texts import text_or_file
from kvcomm_p2p.doctor import Finding, examine, is_healthy
from kvcomm_p2p.errors import UsageError

IDENTITY = {"weights": "w", "kv_dtype": "float32", "tokenizer": "t", "rotary": "r", "config": "c", "adapter": ""}


def peer(name: str, **changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "node_id": f"id-{name}",
        "name": name,
        "state": "alive",
        "model_id": "m",
        "control": "127.0.0.1:2",
        "anchors": 5,
        "heard_age_s": 0.2,
        "penalty_s": 0.0,
        "epoch": 1,
        "incarnation": 0,
        "log_seq": 5,
        "told_seq": 5,
        "known_seq": 5,
        "round_trip_s": 0.001,
        "pulled_bytes": 0,
        "uploaded_bytes": 0,
        "busy_told": 0,
        "busy_given": 0,
        "penalties": 0,
        "violations": 0,
        "misses": {},
    }
    return {**row, **changes}


def node(name: str = "me", *peers: dict[str, Any], **changes: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": name,
        "node_id": f"id-{name}",
        "address": "127.0.0.1:1",
        "model": "tiny",
        "model_id": "m",
        "metrics_address": "",
        "peers": list(peers) or [peer("other")],
        "protocol_version": 2,
        "state_dir": "/state",
        "bind_host": "127.0.0.1",
        "cluster": "default",
        "cluster_mark": "aa",
        "identity": IDENTITY,
        "share_refusal": "",
        "exact_only": "",
        "gossip_interval_s": 0.2,
        "pool_bytes_max": 1 << 30,
        "misses": {},
        "wait_lost_s": 0.0,
        "stats": {"pool_anchors": 5, "refused_deltas": 0, "rejected_anchors": 0, "sharded": False},
        "dropped": {},
        "lost": {},
        "unreachable": 0,
        "failures": 0,
    }
    stats = {**facts["stats"], **changes.pop("stats", {})}
    return {**facts, **changes, "stats": stats}


def secured(**changes: Any) -> dict[str, Any]:
    """A node whose connections are encrypted."""
    plain = {"encrypted": True, "line": "kvcomm-peer-1:me", "allowed": ["alice"]}
    return node(security={**plain, "failed": [], "turned_away": [], "other_secret": [], **changes})


def other(**changes: Any) -> dict[str, Any]:
    """The peer of `node()`, which runs on this machine too."""
    return node("other", peer("me"), **changes)


def report(**changes: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "prompt_tokens": 100,
        "exact_tokens": 0,
        "continued_tokens": 0,
        "reused_tokens": 0,
        "recomputed_tokens": 100,
        "covered_tokens": 0,
        "spans": [],
        "misses": [],
        "runs": [],
    }
    return {**plain, **changes}


def found(*arguments: Any, **named: Any) -> list[Finding]:
    return [finding for finding in examine(*arguments, **named) if finding.level != "ok"]


def test_a_healthy_node_is_told_to_be_healthy() -> None:
    findings = examine(node(), node(), [other()])
    assert is_healthy(findings)
    assert [finding.level for finding in findings] == ["ok"] * 15


COSTLY = {"what": "tokens 0-90 from other", "reason": "cost", "detail": "recomputing is faster"}

CAUSES: list[tuple[str, str, str, tuple[Any, ...]]] = [
    # check, what the text says, what the fix says, arguments
    ("peers", "knows no other node", "--join 127.0.0.1:1", (node("me", peers=[]),)),
    ("peers", "of the 1 node that it knows none is alive", "", (node("me", peer("other", state="dead")),)),
    ("cluster key", "other has another cluster key", "cluster.key", (node(), None, [other(cluster_mark="bb")])),
    ("cluster key", "belongs to cluster 'x'", "`cluster` setting", (node(), None, [other(cluster="x")])),
    (
        "cluster key",
        "3 frames came without the seal of this cluster's key, and more",
        "cluster.key",
        (node(dropped={"bad_seal": 1}), node(dropped={"bad_seal": 3})),
    ),
    (
        "keys on disk",
        "another than the one that this node started with",
        "restart this node",
        (node(), None, (), None, {"problems": [], "cluster_mark": "bb"}),
    ),
    (
        "keys on disk",
        "cluster key x can be read by other users",
        "chmod 600",
        (
            node(),
            None,
            (),
            None,
            {"problems": [("cluster key x can be read by other users", "chmod 600 x")], "cluster_mark": ""},
        ),
    ),
    (
        "connections",
        "node at 192.0.2.1:5 (alice) does not let this one in (3 times, last 5.00 s ago)",
        "kvcomm keys allow 'kvcomm-peer-1:me'",
        (
            secured(
                failed=[{"address": "192.0.2.1:5", "expected": "alice", "why": "refused", "count": 3, "age_s": 5.0}]
            ),
        ),
    ),
    (
        "connections",
        "does not have the key of alice, or does not encrypt",
        "#NAME",
        (
            secured(
                failed=[{"address": "192.0.2.1:5", "expected": "alice", "why": "other key", "count": 1, "age_s": 5.0}]
            ),
        ),
    ),
    (
        "connections",
        "from 192.0.2.9 was not let in",
        "kvcomm keys allow LINE",
        (secured(turned_away=[{"address": "192.0.2.9", "key": "ab", "count": 1, "age_s": 5.0}]),),
    ),
    (
        "connections",
        "bob seals with another secret",
        "kvcomm keys invite",
        (secured(other_secret=[{"label": "bob", "count": 1, "age_s": 5.0}]),),
    ),
    (
        "connections",
        "2 messages were about nodes that are not on this allow-list",
        "everybody has to allow everybody",
        (node(), node(dropped={"not_believed": 2})),
    ),
    ("connections", "of another key than", "revoked", (node(), node(dropped={"wrong_key": 2}))),
    ("connections", "not genuine", "hostile", (node(), node(dropped={"bad_signature": 2}))),
    (
        "identity",
        "peers talk to that one and not to this",
        "kvcomm keys new",
        (node(stats={"twin": ("192.0.2.3:4", True)}),),
    ),
    ("identity", "peers talk to this one", "kvcomm keys new", (node(stats={"twin": ("192.0.2.3:4", False)}),)),
    ("protocol version", "speaks protocol 1", "same version", (node(), None, [other(protocol_version=1)])),
    ("protocol version", "could not be decoded", "same version", (node(dropped={"undecodable": 2}),)),
    ("model", "which part differs cannot be known", "kvcomm doctor other", (node("me", peer("other", model_id="x")),)),
    (
        "model",
        "different in the number format of the KV (--dtype), the weights",
        "same files",
        (
            node("me", peer("other", model_id="x")),
            None,
            [other(identity={**IDENTITY, "weights": "v", "kv_dtype": "bfloat16"})],
        ),
    ),
    (
        "peers' state",
        "taken for dead: nothing was heard of it for 5.00 s",
        "",
        (node("me", peer("other", state="dead", heard_age_s=5.0)),),
    ),
    ("peers' state", "other is suspected", "frozen", (node("me", peer("other", state="suspect")),)),
    ("penalties", "not asked for another 9.00 s", "frozen", (node("me", peer("other", penalty_s=9.0)),)),
    ("penalties", "broke the protocol's rules 2 times", "hostile", (node("me", peer("other", violations=2)),)),
    (
        "gossip",
        "its log has 9 entries; 4 of them did not come",
        "directory",
        (node("me", peer("other", told_seq=9)), node("me", peer("other", told_seq=9))),
    ),
    ("directory", "news were refused 2 times", "pool_anchors_max", (node(stats={"refused_deltas": 2}),)),
    ("directory", "3 anchors found no room", "pool_bytes_max", (node(stats={"rejected_anchors": 3}),)),
    (
        "holders",
        "2 times other sent something else than it had announced (digest_mismatch)",
        "hostile",
        (node("me", peer("other", misses={"digest_mismatch": 2})),),
    ),
    (
        "approximation",
        "only exact prefixes are reused: no profile",
        "kvcomm calibrate tiny",
        (node(exact_only="no profile"),),
    ),
    (
        "approximation",
        "cannot be shared at all: Mamba",
        "another model",
        (node(exact_only="x", share_refusal="Mamba"),),
    ),
    ("own transport", "refuses frames (4 so far)", "", (node(), node(lost={"Syn": 4}))),
    ("own transport", "1 internal errors", "report", (node(failures=1),)),
    ("this prompt", "none of its 100 tokens stands in anything", "same text", (node(), None, [], report())),
]


@pytest.mark.parametrize(("check", "text", "fix", "arguments"), CAUSES, ids=[f"{c[0]}-{c[1][:24]}" for c in CAUSES])
def test_every_cause_is_a_problem_of_its_own_check(check: str, text: str, fix: str, arguments: tuple[Any, ...]) -> None:
    problems = [finding for finding in found(*arguments) if finding.level == "problem"]
    here = [finding for finding in problems if finding.check == check]
    assert [finding for finding in here if text in finding.text and fix in finding.fix], problems
    others = {finding.check for finding in problems} - {check}
    assert others <= {"peers", "peers' state"}, problems  # whoever is dead is no peer to share with either
    assert not is_healthy(problems)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("neither knows the other", (node("me", peer("third")), None, [other()])),
        ("other has left", (node("me", peer("other", state="left"), peer("third")),)),
        (
            "has 4 entries more than have come here yet",
            (node("me", peer("other", told_seq=9)), node("me", peer("other", told_seq=10, log_seq=6))),
        ),
        ("private", (node(), None, [other(stats={"pool_anchors": 8})])),
        ("keeps no full index", (node("me", peer("other", anchors=0, told_seq=9), stats={"sharded": True}),)),
        ("no peer has announced anything", (node("me", peer("other", anchors=0)),)),
        ("3 blocks of what other had announced could not", (node("me", peer("other", misses={"evicted": 3})),)),
        ("busy 7 times; 4 blocks", (node("me", peer("other", busy_told=7, misses={"busy": 4})),)),
        ("5 frames came", (node(dropped={"bad_seal": 5}),)),
        ("5 records had signatures", (node(dropped={"bad_signature": 5}),)),
        (
            "from 192.0.2.9 was not let in",
            (secured(turned_away=[{"address": "192.0.2.9", "key": "ab", "count": 1, "age_s": 500.0}]),),
        ),
        ("were lost waiting", (node(wait_lost_s=3.0),)),
        ("cost: recomputing is faster", (node(), None, [], report(covered_tokens=90, misses=[COSTLY]))),
    ],
)
def test_what_passes_by_itself_is_a_note(text: str, arguments: tuple[Any, ...]) -> None:
    findings = found(*arguments)
    assert [finding.level for finding in findings if text in finding.text] == ["note"], findings
    assert is_healthy(findings)


def test_the_first_reason_of_every_candidate() -> None:
    misses = [
        {"what": "token ids from frozen", "reason": "stalled", "detail": "token ids did not come"},
        {"what": "tokens 0-90 from far", "reason": "divergence", "detail": "0.4 above 0.02"},
        {"what": "tokens 90-95 from far", "reason": "too_short", "detail": ""},
    ]
    peers = (
        peer("frozen"),
        peer("far"),
        peer("dead", state="dead"),
        peer("foreign", model_id="x"),
        peer("punished", penalty_s=3.0),
        peer("empty", anchors=0),
        peer("unlike"),
    )
    findings = found(node("me", *peers), report=report(covered_tokens=95, misses=misses))
    here = {finding.about: finding.text for finding in findings if finding.check == "this prompt"}
    assert here == {
        "frozen": "stalled: token ids did not come",
        "far": "divergence: 0.4 above 0.02",
        "dead": "it is dead",
        "foreign": "it runs another model",
        "punished": "it is not asked for another 3.00 s",
        "empty": "it has announced nothing",
        "unlike": "none of its 5 anchors has a run of this prompt, or none that may be seen",
    }
    assert {
        finding.level for finding in findings if finding.about in ("frozen", "far") and finding.check == "this prompt"
    } == {"problem"}


def test_a_prompt_that_hits_is_healthy() -> None:
    spans = [{"source": "other"}, {"source": ""}]
    runs = [{"others": [{"source": "third", "why": "less alike context"}]}]
    findings = examine(node(), report=report(reused_tokens=90, covered_tokens=90, spans=spans, runs=runs))
    assert is_healthy(findings)
    assert "90 of 100 tokens would come from other" in [finding.text for finding in findings][-2]
    assert findings[-1].about == "third"


def test_the_command(kvcomm: Kvcomm, tmp_path: Path) -> None:
    missing = kvcomm.run("doctor", "--prompt", "missing.md")
    assert (missing.returncode, missing.stdout) == (1, "") and "there is no file missing.md" in missing.stderr
    nothing = kvcomm.run("doctor", "--json")
    assert nothing.returncode == 1
    assert "no node of yours runs" in json.loads(nothing.stdout)["nodes"][0]["findings"][0]["text"]
    kvcomm.node("lonely")
    done = kvcomm.run("doctor")
    assert done.returncode == 1
    assert "problem peers: it knows no other node" in done.stdout
    assert "do: start others with --join" in done.stdout
    (tmp_path / "prompt.txt").write_text("one two three", encoding="utf-8")
    prompted = json.loads(kvcomm.run("doctor", "lonely", "--prompt", str(tmp_path / "prompt.txt"), "--json").stdout)
    texts = [finding["text"] for finding in prompted["nodes"][0]["findings"] if finding["check"] == "this prompt"]
    assert texts[0] == "1 of 3 tokens would come from planner"
    kvcomm.node("loner")
    many = kvcomm.run("doctor", "--prompt", "x")
    assert many.returncode == 1 and "name the one whose lookup misses" in many.stderr


@pytest.mark.parametrize("prompt", ["missing.md", "notes/missing", "./x.TXT", "report.json"])
def test_a_prompt_that_looks_like_a_missing_file_is_an_error(prompt: str) -> None:
    with pytest.raises(
        UsageError, match=f"there is no file {re.escape(prompt)}: check the path .*--prompt - reads stdin"
    ):
        text_or_file(prompt, "--prompt")


@pytest.mark.parametrize(
    "prompt", ["Judge it.", "v1.5", "either/or is no path", "read notes.md", "報告。", "long" * 2000, "nul \0"]
)
def test_other_prompts_are_texts(prompt: str) -> None:
    assert text_or_file(prompt, "--prompt") == prompt


def test_facts_are_not_changed() -> None:
    facts = node("me", peer("other", state="dead"))
    before = copy.deepcopy(facts)
    examine(facts, report=report())
    assert facts == before
