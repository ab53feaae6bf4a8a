"""A node in its own process: holds one anchor, prints its control address, lives until its input closes.

Usage: holder_process.py NUMBER BLOCKS BLOCK_BYTES [shared]
"""

from __future__ import annotations

import sys

from net_nodes import TestNode, make_anchor

from kvcomm_p2p.net.shared_memory import SharedMemory
from kvcomm_p2p.net.zmq_transport import ZmqTransport


def main() -> None:
    number, blocks, kv_bytes = (int(argument) for argument in sys.argv[1:4])
    shared = SharedMemory() if "shared" in sys.argv else None
    with TestNode("holder", ZmqTransport(), shared=shared) as node:
        node.hold(make_anchor(node.store, number, blocks=blocks, block_kv_bytes=kv_bytes))
        print(node.driver.addresses.control, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
