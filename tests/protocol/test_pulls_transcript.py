"""One recorded history of pulling as text: what the nodes ask of their drivers must not change without intent.

To accept a change: `python test_pulls_transcript.py > pulls_transcript.txt` in this folder, and read the difference.
"""

from __future__ import annotations

import sys
from pathlib import Path

from protocol_harness import held, meta, record, wants
from test_pulls import hello, puller

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol import messages as m
from kvcomm_p2p.protocol.anchors import BlockHandle
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.node import Node

GOLDEN = Path(__file__).with_name("pulls_transcript.txt")
DOC, LONG = meta("doc"), meta("long", tokens=192)
PEERS = [record(index) for index in (1, 2, 3)]
BLOCK = 32 * 8


class Scribe:
    """Shows a node events and writes down its effects, handles and ids as short names."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.lines: list[str] = []
        self._handles: dict[BlockHandle, str] = {}
        self._names = {peer.node_id: peer.name for peer in PEERS}

    def tell(self, title: str, event: ev.Event, now: float) -> None:
        self.lines.append(f"{now:.3f} {title}")
        effects = self.node.handle(event, now)
        mine = [e for e in effects if not (isinstance(e, ev.SendMessage) and e.plane is ev.Plane.CONTROL)]
        self.lines += [f"      {self._text(effect)}" for effect in mine if not isinstance(effect, ev.SaveState)]

    def _handle(self, handle: BlockHandle) -> str:
        return self._handles.setdefault(handle, f"h{len(self._handles)}")

    def _text(self, effect: ev.Effect) -> str:
        if isinstance(effect, ev.SendMessage):
            return f"to {self._names.get(effect.to or b'', '?')} {effect.plane.value}: {self._message(effect.message)}"
        if isinstance(effect, ev.SendBlock):
            who = self._names[effect.to]
            return f"block to {who} pull {effect.pull_id}:{effect.ordinal} {effect.offset}..{effect.kv_bytes}"
        if isinstance(effect, ev.StoreChunk):
            return f"store {self._handle(effect.handle)} {effect.offset}+{effect.length} of {effect.kv_bytes}"
        if isinstance(effect, ev.VerifyBlock | ev.DropBlock | ev.RetainBlock | ev.ResetBlock):
            return f"{type(effect).__name__} {self._handle(effect.handle)}"
        if isinstance(effect, ev.FinishFetch):
            found = " ".join(f"{block.key.index}={self._handle(block.handle)}" for block in effect.found)
            missed = " ".join(f"{block.key.index}:{block.miss.reason.value}" for block in effect.missed)
            return f"finish {effect.fetch_id} found [{found}] missed [{missed}] lost {effect.wait_lost_s:.3f}"
        if isinstance(effect, ev.ReportPeer):
            return f"report {effect.name} {effect.change}"
        return type(effect).__name__

    def _message(self, message: m.Message) -> str:
        if isinstance(message, m.Pull):
            blocks = " ".join(f"{block.index}@{block.offset}" for block in message.blocks)
            return f"Pull {message.pull_id} [{blocks}]"
        if isinstance(message, m.Credit):
            return f"Credit {message.pull_id} {message.received}"
        if isinstance(message, m.CancelPull):
            return f"CancelPull {message.pull_id}"
        if isinstance(message, m.PullFailed):
            named = " ".join(self._names[peer] for peer in message.referrals)
            return f"PullFailed {message.pull_id} {message.ordinal} {message.reason.name} [{named}]"
        return type(message).__name__


def history() -> str:
    node = puller(NodeConfig(pull_piece_bytes=3 * BLOCK, uploads_max=2))
    node.handle(hello(PEERS[2]), 0.0)
    scribe = Scribe(node)
    one, two, three = (peer.node_id for peer in PEERS)
    wanted = wants(LONG)
    busy = m.PullFailed(2, None, m.PullFailedReason.BUSY, 0.04, (three,))
    fetch = ev.FetchRequested(1, (one, two), wanted, 9.0, anchors=(LONG,))
    scribe.tell("fetch six blocks of node1, node2 has them too", fetch, 1.0)
    scribe.tell("node1 is busy for the second piece and names node3", ev.MessageReceived(one, busy), 1.01)
    scribe.tell("node1 sends a part of a block", ev.ChunkReceived(one, 1, 0, 0, 100), 1.02)
    gone = m.PullFailed(3, 1, m.PullFailedReason.NOT_FOUND)
    scribe.tell("node3 does not have the second block", ev.MessageReceived(three, gone), 1.03)
    scribe.tell("a second fetch wants the same", ev.FetchRequested(2, (two,), wants(LONG)[:1], 9.0), 1.04)
    now = 1.05
    while node.stats().fetches and now < 2.0:
        now = max(now, node.next_deadline())
        scribe.tell("time", ev.TimerExpired(), now)
    few = wants(DOC)
    scribe.tell("fetch two blocks of node3", ev.FetchRequested(3, (three,), few, 9.0, anchors=(DOC,)), 2.5)
    scribe.tell("the first comes", ev.ChunkReceived(three, 8, 0, 0, BLOCK), 2.51)
    scribe.tell("and is right", ev.BlockVerified(few[0].handle, True), 2.52)
    scribe.tell("the second comes", ev.ChunkReceived(three, 8, 1, 0, BLOCK), 2.53)
    scribe.tell("and is wrong", ev.BlockVerified(few[1].handle, False), 2.54)
    node.handle(ev.AnchorsPublished((held(DOC),)), 3.0)
    blocks = tuple(m.PullBlock(DOC.anchor_id, index, BLOCK, 8 * index) for index in range(2))
    scribe.tell(
        "node2 pulls two blocks, has 8 bytes of the second", ev.MessageReceived(two, m.Pull(1, blocks, 10**6)), 3.0
    )
    scribe.tell("node2 has everything", ev.MessageReceived(two, m.Credit(1, 2 * BLOCK - 8)), 3.1)
    for pull_id in (1, 2, 3):
        scribe.tell("node3 pulls", ev.MessageReceived(three, m.Pull(pull_id, blocks, 10**6)), 3.2)
    scribe.tell("leave", ev.LeaveRequested(), 3.3)
    return "\n".join(scribe.lines) + "\n"


def test_the_recorded_history_has_not_changed() -> None:
    assert history() == GOLDEN.read_text()


if __name__ == "__main__":
    sys.stdout.write(history())
