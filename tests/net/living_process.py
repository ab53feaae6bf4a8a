"""A node in its own process that keeps its state: prints its control address, lives until its input closes.

Usage: living_process.py STATE_DIR NAME [SEED]
"""

from __future__ import annotations

import sys
from pathlib import Path

from net_nodes import TestNode

from kvcomm_p2p.net.durable import open_life
from kvcomm_p2p.net.zmq_transport import ZmqTransport


def main() -> None:
    state_dir, name, *seeds = sys.argv[1:]
    life = open_life(Path(state_dir), "default", name)
    with TestNode(name, ZmqTransport(), life=life) as node:
        if seeds:
            node.join(seeds[0])
        print(node.driver.addresses.control, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
