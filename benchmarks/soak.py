"""Churn among real processes, for half an hour unless told otherwise: `python benchmarks/soak.py [--minutes M] [--write PATH]`.

Prints the rows as a table on stderr and as JSON on stdout, or in the file given. The samples go beside it as CSV.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from rich.console import Console

from kvcomm_p2p.evaluation.cluster_soak import Soak, soak
from kvcomm_p2p.evaluation.progress import stepping
from kvcomm_p2p.evaluation.results import Result


def write_samples(path: Path, outcome: Soak) -> None:
    names = sorted({name for sample in outcome.samples for name in sample.use})
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["seconds", *names])
        for sample in outcome.samples:
            writer.writerow([round(sample.at, 1), *(sample.use.get(name, "") for name in names)])


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks/soak.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    console = Console(stderr=True, width=160)
    with stepping(console, "soak", 0) as step:
        rows, outcome = soak(step, minutes=options.minutes, seed=options.seed)
    result = Result(f"soak, {options.minutes:g} min", rows, options.seed)
    console.print(result.table())
    if options.write:
        result.write(options.write)
        write_samples(options.write.with_suffix(".csv"), outcome)
    else:
        print(result.to_json())


if __name__ == "__main__":
    main()
