"""Prints `kvcomm_p2p.evaluation.ttft` as a table on stderr and as JSON on stdout, or in the file given as an argument."""

import sys
from pathlib import Path

from rich.console import Console

from kvcomm_p2p.evaluation.ttft import run

if __name__ == "__main__":
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 160)
    result = run(console)
    console.print(result.table())
    if len(sys.argv) > 1:
        result.write(Path(sys.argv[1]))
    else:
        print(result.to_json())
