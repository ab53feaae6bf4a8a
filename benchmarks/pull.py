"""Loopback pull of 32 MiB beside a plain TCP socket: `python benchmarks/pull.py [--runs N] [--json]`."""

from kvcomm_p2p.evaluation.pull import main

if __name__ == "__main__":
    raise SystemExit(main())
