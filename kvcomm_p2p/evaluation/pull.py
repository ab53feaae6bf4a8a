"""How fast blocks come from a peer on the same machine, beside a plain TCP socket that moves the same bytes.

Two processes, each with a real driver over ZeroMQ; the puller fetches two anchors (728 tokens of the default model's KV in
float32, 32 MiB in 23 blocks) as the engine would. The plain socket reads into one preallocated buffer. Both take turns.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvcomm_p2p.evaluation.results import Result, Row
from kvcomm_p2p.net.driver import Driver
from kvcomm_p2p.net.interpreter import is_digest
from kvcomm_p2p.net.keys import ClusterKeys
from kvcomm_p2p.net.transport import Addresses
from kvcomm_p2p.net.zmq_transport import ZmqTransport
from kvcomm_p2p.protocol.anchors import ANCHOR_TOKENS_MAX, AnchorMeta, BlockKey, HeldAnchor, Visibility
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.ids import AnchorId, ChainHash, ModelId, NodeId, SequenceId
from kvcomm_p2p.protocol.messages import MemberRecord
from kvcomm_p2p.protocol.node import Node
from kvcomm_p2p.store import BlockStore

if TYPE_CHECKING:
    from rich.console import Console

TOKEN_BYTES = 46_080
"""SmolLM2-135M in float32: 30 layers, 3 kv-heads, 64 + 64 dims."""

TOKENS = 728
CASE = "32 MiB loopback"
Wants = list[tuple[BlockKey, int, bytes]]


def measure(runs: int = 15, seed: int = 0) -> Result:
    """Medians over `runs` turns of each way, after two turns that do not count."""
    keys = ClusterKeys.derive(random.Random(seed).randbytes(32))
    plain: list[float] = []
    pulled: list[float] = []
    unchecked: list[float] = []
    digest: list[float] = []
    with _holder(keys, seed) as (pipe, address, port):
        wants: Wants = pipe.recv()
        total = sum(kv_bytes for _, kv_bytes, _ in wants)
        buffer = bytearray(total)
        with (
            socket.create_connection(("127.0.0.1", port)) as stream,
            _puller(keys, address, is_digest) as pull,
            _puller(keys, address, lambda view, digest: True) as pull_unchecked,
        ):
            for _ in range(runs + 2):
                plain.append(_read_plain(stream, buffer))
                pulled.append(pull(wants))
                unchecked.append(pull_unchecked(wants))
                started = time.perf_counter()
                hashlib.sha256(buffer).digest()
                digest.append(time.perf_counter() - started)
    return Result("bench pull", _rows(plain[2:], pulled[2:], unchecked[2:], digest[2:]), seed)


def run(console: Console, runs: int = 15) -> Result:
    """`measure` with a word about progress on `console`."""
    with console.status(f"pulling 32 MiB from another process, {runs + 2} turns of each way"):
        return measure(runs)


def _rows(plain: list[float], pulled: list[float], unchecked: list[float], digest: list[float]) -> list[Row]:
    """Medians, and fastest turns, which other work on the machine disturbs least."""
    rows = [_median(plain, "plain TCP socket", None), _median(digest, "SHA-256 alone, one thread", None)]
    for metric, seconds in (("pull, digests not checked", unchecked), ("pull, digests checked meanwhile", pulled)):
        rows.append(_median(seconds, metric, plain))
        fastest, base = min(seconds) * 1e3, min(plain) * 1e3
        rows.append(Row(CASE, f"{metric}, fastest", fastest, "ms", len(seconds), None, base, base / fastest))
    return rows


def _median(seconds: list[float], metric: str, baseline: list[float] | None) -> Row:
    value = statistics.median(seconds) * 1e3
    base = None if baseline is None else statistics.median(baseline) * 1e3
    return Row(
        CASE, metric, value, "ms", len(seconds), _interval(seconds), base, None if base is None else base / value
    )


def _interval(seconds: list[float]) -> tuple[float, float]:
    """95 % interval of the median by bootstrap, in ms."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(seconds, (2000, len(seconds))), axis=1) * 1e3
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(low), float(high)


def _read_plain(stream: socket.socket, buffer: bytearray) -> float:
    view = memoryview(buffer)
    started = time.perf_counter()
    stream.sendall(b"?")
    received = 0
    while received < len(buffer):
        count = stream.recv_into(view[received:])
        if not count:
            raise ConnectionError("the holder process ended")
        received += count
    return time.perf_counter() - started


@contextmanager
def _puller(
    keys: ClusterKeys, address: str, verify: Callable[[memoryview, bytes], bool]
) -> Iterator[Callable[[Wants], float]]:
    store = BlockStore()
    driver = Driver(_make_node("puller"), ZmqTransport(), store, keys, verify=verify)
    driver.start()
    try:
        driver.run(driver.join([address], 10.0)).result(15)
        holder = driver.run(_peer(driver)).result(5)

        async def pull(wants: Wants) -> float:
            started = time.perf_counter()
            result = await driver.fetch(holder, wants, 10.0)
            seconds = time.perf_counter() - started
            for handle in result.found.values():
                store.drop(handle)
            if result.missed:
                raise RuntimeError(f"blocks were missed: {set(result.missed.values())}")
            return seconds

        yield lambda wants: driver.run(pull(wants)).result(15)
    finally:
        driver.stop()


async def _peer(driver: Driver) -> NodeId:
    (holder,) = [peer.node_id for peer in driver.peers() if peer.name == "holder"]
    return holder


def _make_node(name: str) -> Callable[[Addresses, float], Node]:
    def make(addresses: Addresses, now: float) -> Node:
        me = MemberRecord(
            node_id=NodeId(os.urandom(16)),
            epoch=1,
            name=f"{name}-{os.urandom(4).hex()}" if name == "puller" else name,
            model_id=ModelId(bytes(16)),
            control=addresses.control,
            bulk=addresses.bulk,
        )
        return Node(NodeConfig(), me=me, rng=random.Random(name), now=now)

    return make


@contextmanager
def _holder(keys: ClusterKeys, seed: int) -> Iterator[tuple[Connection, str, int]]:
    """The other process; yields its pipe, control address and plain port."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_hold, args=(theirs, keys.seal, keys.content, seed), daemon=True)
    process.start()
    theirs.close()
    try:
        if not pipe.poll(30):
            raise RuntimeError("the holder process did not start within 30 s")
        address, port = pipe.recv()
        yield pipe, address, port
    finally:
        pipe.close()
        process.join(10)
        if process.is_alive():
            process.kill()


def _hold(pipe: Connection, seal: bytes, content: bytes, seed: int) -> None:
    store = BlockStore()
    driver = Driver(_make_node("holder"), ZmqTransport(), store, ClusterKeys(seal, content))
    addresses = driver.start()
    with socket.create_server(("127.0.0.1", 0)) as server:
        anchors, blocks = _anchors(store, seed)
        driver.run(driver.publish(anchors)).result(5)
        pipe.send((addresses.control, server.getsockname()[1]))
        pipe.send([want for anchor in anchors for want in _wants(anchor)])
        stream, _ = server.accept()
        with stream:
            while stream.recv(1):
                for block in blocks:
                    stream.sendall(block)
    driver.stop()


def _anchors(store: BlockStore, seed: int) -> tuple[list[HeldAnchor], list[bytes]]:
    rng = np.random.default_rng(seed)
    anchors: list[HeldAnchor] = []
    blocks: list[bytes] = []
    for start in range(0, TOKENS, ANCHOR_TOKENS_MAX):
        end = min(start + ANCHOR_TOKENS_MAX, TOKENS)
        meta = AnchorMeta(
            anchor_id=AnchorId(start.to_bytes(16, "big")),
            model_id=ModelId(bytes(16)),
            sequence_id=SequenceId(bytes(8)),
            start=start,
            end=end,
            chain_end=ChainHash(b""),
            fingerprints=b"",
            hops=0,
            visibility=Visibility.PUBLIC,
            group=b"",
            kv_bytes=(end - start) * TOKEN_BYTES,
        )
        own = [rng.bytes(meta.block_tokens(index) * TOKEN_BYTES) for index in range(meta.blocks)]
        handles = tuple(store.put(block) for block in own)
        digests = tuple(hashlib.sha256(block).digest() for block in own)
        anchors.append(HeldAnchor(meta, np.arange(start, end, dtype=np.uint32), handles, digests))
        blocks += own
    return anchors, blocks


def _wants(anchor: HeldAnchor) -> Wants:
    meta = anchor.meta
    return [
        (BlockKey(meta.anchor_id, index), meta.block_tokens(index) * TOKEN_BYTES, digest)
        for index, digest in enumerate(anchor.digests)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of `benchmarks/pull.py`. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/pull.py", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--runs", type=int, default=15, help="turns of each way (default 15)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--write", type=Path, help="also write the JSON to this file")
    options = parser.parse_args(arguments)
    result = measure(options.runs)
    if options.write:
        result.write(options.write)
    if options.json:
        sys.stdout.write(result.to_json() + "\n")
    else:
        from rich.console import Console

        Console().print(result.table())
    return 0
