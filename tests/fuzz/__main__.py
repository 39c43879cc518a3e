"""python -m tests.fuzz [--cases N] [--seed N] [--minutes N]: see `tests.fuzz.cases`."""

from __future__ import annotations

import argparse
import random
import sys

from serve_app.store.builtin_model import BUILTIN_MODEL
from tests.fuzz.cases import run, served


def main() -> None:
    """Try cases until one fails, or all have passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=run.__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="default: any")
    parser.add_argument("--minutes", type=float, default=20, help="stop then at the latest")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    with served(BUILTIN_MODEL) as app:
        statuses = run(app, args.cases, args.seed, args.minutes * 60)
    print(f"{statuses.total()} cases, by status: {dict(sorted(statuses.items()))}")
    if statuses.total() < args.cases:
        sys.exit("There was no time for all cases.")


if __name__ == "__main__":
    main()
