"""How long `import kvcomm_p2p` and `kvcomm --help` take beyond starting the interpreter. `--json` for the results object.

python benchmarks/import_time.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from rich.console import Console

from kvcomm_p2p.evaluation.results import Result, Row

RUNS = 15
CASES = {
    "import kvcomm_p2p": "import kvcomm_p2p",
    "kvcomm --help": "from kvcomm_p2p.cli import main; main(['--help'])",
}


def start_s(source: str) -> float:
    """Seconds from starting an interpreter with `source` to its end."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", source], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def main() -> None:
    rows = []
    for case, source in CASES.items():
        start_s(source)  # reads the files once, so that the disk is not measured
        pairs = [(start_s("pass"), start_s(source)) for _ in range(RUNS)]
        bare_s = statistics.median(bare for bare, _ in pairs)
        median_s = statistics.median(whole for _, whole in pairs)
        rows.append(Row(case, "start_median", median_s, "s", RUNS, baseline=bare_s))
        rows.append(Row(case, "over_bare_start", statistics.median(whole - bare for bare, whole in pairs), "s", RUNS))
    result = Result("bench import_time", rows, seed=0)
    if "--json" in sys.argv[1:]:
        print(result.to_json())
    else:
        Console().print(result.table())


if __name__ == "__main__":
    main()
