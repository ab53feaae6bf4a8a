"""How fast blocks come from a peer on the same machine, beside a plain TCP socket that moves the same bytes.

Two processes, each with a real driver over ZeroMQ; the puller fetches as the engine would: the default model's KV in
float32, 728 tokens (32 MiB in 23 blocks of two anchors) or 22 (1 MiB in one). The plain socket reads into one preallocated
buffer. Shared memory is the same pull by a puller that shares memory with the holder. All take turns.
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
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvcomm_p2p.evaluation.results import Result, Row
from kvcomm_p2p.net.driver import Driver
from kvcomm_p2p.net.gate import Gate, curve_keys
from kvcomm_p2p.net.identity import Identity
from kvcomm_p2p.net.interpreter import is_digest
from kvcomm_p2p.net.keys import ClusterKeys
from kvcomm_p2p.net.shared_memory import SharedMemory, host_tag
from kvcomm_p2p.net.signatures import signed_record
from kvcomm_p2p.net.transport import Addresses
from kvcomm_p2p.net.zmq_transport import ZmqTransport
from kvcomm_p2p.protocol.anchors import AnchorMeta, BlockKey, HeldAnchor, Visibility
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.ids import AnchorId, ChainHash, ModelId, NodeId, SequenceId
from kvcomm_p2p.protocol.messages import Capability, MemberRecord
from kvcomm_p2p.protocol.node import Node
from kvcomm_p2p.store import BlockStore

if TYPE_CHECKING:
    from rich.console import Console

TOKEN_BYTES = 46_080
"""SmolLM2-135M in float32: 30 layers, 3 kv-heads, 64 + 64 dims."""

CASES = {"32 MiB loopback": (512, 216), "1 MiB loopback": (22,)}
"""Tokens of the anchors that are pulled together."""

PAGE_BYTES = 4096
Wants = list[tuple[BlockKey, int, bytes]]
Verify = Callable[[memoryview, bytes], bool]


def _unchecked(view: memoryview, digest: bytes) -> bool:
    return True


def _touched(view: memoryview, digest: bytes) -> bool:
    """Reads a byte of every page: what has been mapped only costs its page faults when it is read."""
    return bool(np.frombuffer(view, dtype=np.uint8)[::PAGE_BYTES].sum() >= 0)


ENCRYPTED = "pull, encrypted (CURVE), digests checked"

WAYS: dict[str, tuple[Verify, bool]] = {
    "pull, digests not checked": (_unchecked, False),
    "pull, digests checked meanwhile": (is_digest, False),
    "shared memory, digests not checked": (_unchecked, True),
    "shared memory, every page touched": (_touched, True),
    "shared memory, digests checked": (is_digest, True),
}
"""How a puller checks blocks, and whether it shares memory with the holder."""


def measure(runs: int = 15, seed: int = 0) -> Result:
    """Medians over `runs` turns of each way, after two turns that do not count."""
    keys = ClusterKeys.derive(random.Random(seed).randbytes(32))
    rows: list[Row] = []
    with _holder(keys, seed) as (pipe, address, port), ExitStack() as pullers:
        wants: dict[str, Wants] = pipe.recv()
        stream = pullers.enter_context(socket.create_connection(("127.0.0.1", port)))
        ways = {
            metric: pullers.enter_context(_puller(keys, address, verify, shared))
            for metric, (verify, shared) in WAYS.items()
        }
        identity = Identity.new()
        _, secure_address, _ = pullers.enter_context(_holder(keys, seed, identity))
        ways[ENCRYPTED] = pullers.enter_context(_puller(keys, secure_address, is_digest, False, identity))
        for number, case in enumerate(CASES):
            seconds: dict[str, list[float]] = {metric: [] for metric in (PLAIN, DIGEST, *ways)}
            buffer = bytearray(sum(kv_bytes for _, kv_bytes, _ in wants[case]))
            for _ in range(runs + 2):
                seconds[PLAIN].append(_read_plain(stream, number, buffer))
                for metric, pull in ways.items():
                    seconds[metric].append(pull(wants[case]))
                started = time.perf_counter()
                hashlib.sha256(buffer).digest()
                seconds[DIGEST].append(time.perf_counter() - started)
            rows += _rows(case, {metric: taken[2:] for metric, taken in seconds.items()})
    return Result("bench pull", rows, seed)


def run(console: Console, runs: int = 15) -> Result:
    """`measure` with a word about progress on `console`."""
    with console.status(f"pulling from another process, {runs + 2} turns of each way"):
        return measure(runs)


PLAIN, DIGEST = "plain TCP socket", "SHA-256 alone, one thread"


def _rows(case: str, seconds: dict[str, list[float]]) -> list[Row]:
    """Medians, and fastest turns, which other work on the machine disturbs least."""
    plain = seconds[PLAIN]
    rows = [_median(case, plain, PLAIN, None), _median(case, seconds[DIGEST], DIGEST, None)]
    for metric in (*WAYS, ENCRYPTED):
        rows.append(_median(case, seconds[metric], metric, plain))
        fastest, base = min(seconds[metric]) * 1e3, min(plain) * 1e3
        rows.append(Row(case, f"{metric}, fastest", fastest, "ms", len(plain), None, base, base / fastest))
    return rows


def _median(case: str, seconds: list[float], metric: str, baseline: list[float] | None) -> Row:
    value = statistics.median(seconds) * 1e3
    base = None if baseline is None else statistics.median(baseline) * 1e3
    return Row(
        case, metric, value, "ms", len(seconds), _interval(seconds), base, None if base is None else base / value
    )


def _interval(seconds: list[float]) -> tuple[float, float]:
    """95 % interval of the median by bootstrap, in ms."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(seconds, (2000, len(seconds))), axis=1) * 1e3
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(low), float(high)


def _read_plain(stream: socket.socket, number: int, buffer: bytearray) -> float:
    view = memoryview(buffer)
    started = time.perf_counter()
    stream.sendall(bytes([number]))
    received = 0
    while received < len(buffer):
        count = stream.recv_into(view[received:])
        if not count:
            raise ConnectionError("the holder process ended")
        received += count
    return time.perf_counter() - started


@contextmanager
def _puller(
    keys: ClusterKeys, address: str, verify: Verify, shared: bool, identity: Identity | None = None
) -> Iterator[Callable[[Wants], float]]:
    store = BlockStore(SharedMemory() if shared else None)
    host = host_tag(keys.content) if shared else b""
    driver = _driver("puller", host, store, keys, identity, verify)
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


def _driver(
    name: str, host: bytes, store: BlockStore, keys: ClusterKeys, identity: Identity | None, verify: Verify = is_digest
) -> Driver:
    """With an identity: encrypted."""
    gate = Gate(identity, required=identity is not None)
    transport = ZmqTransport(curve=curve_keys(gate))
    return Driver(_make_node(name, host, identity), transport, store, keys, verify=verify, gate=gate)


def _make_node(name: str, host: bytes, identity: Identity | None) -> Callable[[Addresses, float], Node]:
    def make(addresses: Addresses, now: float) -> Node:
        own = f"{name}-{os.urandom(4).hex()}" if name == "puller" else name
        me = MemberRecord(
            node_id=NodeId(os.urandom(16)) if identity is None else identity.public.node_id(own),
            epoch=1,
            name=own,
            model_id=ModelId(bytes(16)),
            control=addresses.control,
            bulk=addresses.bulk,
            host=host,
            capabilities=Capability.SHARED_MEMORY if host else 0,
        )
        if identity is not None:
            me = signed_record(identity, me)
        return Node(NodeConfig(), me=me, rng=random.Random(name), now=now)

    return make


@contextmanager
def _holder(keys: ClusterKeys, seed: int, identity: Identity | None = None) -> Iterator[tuple[Connection, str, int]]:
    """The other process; yields its pipe, control address and plain port."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_hold, args=(theirs, keys.seal, keys.content, seed, identity), daemon=True)
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


def _hold(pipe: Connection, seal: bytes, content: bytes, seed: int, identity: Identity | None) -> None:
    store = BlockStore(SharedMemory())
    driver = _driver("holder", host_tag(content), store, ClusterKeys(seal, content), identity)
    addresses = driver.start()
    with socket.create_server(("127.0.0.1", 0)) as server:
        rng = np.random.default_rng(seed)
        cases = {case: [_anchor(store, rng, tokens) for tokens in anchors] for case, anchors in CASES.items()}
        driver.run(driver.publish([anchor for anchors in cases.values() for anchor in anchors])).result(5)
        pipe.send((addresses.control, server.getsockname()[1]))
        pipe.send({case: [want for anchor in anchors for want in _wants(anchor)] for case, anchors in cases.items()})
        blocks = [
            [bytes(store.view(handle)) for anchor in anchors for handle in anchor.handles] for anchors in cases.values()
        ]
        if identity is not None:  # nobody reads what this one holds but pullers
            with suppress(EOFError, OSError):
                pipe.recv()
            driver.stop()
            return
        stream, _ = server.accept()
        with stream:
            while number := stream.recv(1):
                for block in blocks[number[0]]:
                    stream.sendall(block)
    driver.stop()


def _anchor(store: BlockStore, rng: np.random.Generator, tokens: int) -> HeldAnchor:
    """An anchor of random bytes, composed in the store as published ones are."""
    meta = AnchorMeta(
        anchor_id=AnchorId(rng.bytes(16)),
        model_id=ModelId(bytes(16)),
        sequence_id=SequenceId(rng.bytes(8)),
        start=0,
        end=tokens,
        chain_end=ChainHash(b""),
        fingerprints=b"",
        hops=0,
        visibility=Visibility.PUBLIC,
        group=b"",
        kv_bytes=tokens * TOKEN_BYTES,
    )
    blocks = store.compose([meta.block_bytes(index) for index in range(meta.blocks)])
    for buffer in blocks.buffers:
        buffer[:] = rng.bytes(buffer.nbytes)
    digests = tuple(hashlib.sha256(block).digest() for block in blocks.finish())
    return HeldAnchor(meta, np.arange(tokens, dtype=np.uint32), blocks.put(), digests)


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
