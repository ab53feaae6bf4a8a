"""`python -m kvcomm_p2p.cli` is `kvcomm`: for environments whose scripts are not on the path."""

from __future__ import annotations

from kvcomm_p2p.cli import main

main()
