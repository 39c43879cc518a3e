"""Measures what a draft model gains that is always right: the most that any can. No Ray, no HTTP.

    python -m loadtests.engine.drafts [--target PATH --draft PATH] [--streams 1,16] [--tokens 96]
        [--prompt-tokens 32] [--rounds 3] [--threads N] [--target-type q8_0] [--draft-type q4_0]
        [--folder build/drafts]

The engine with the draft and the engine without it have a process each, and take turns. Lookup is off in
both. Without files, models with random weights are made (`models`): a 0.6B shape drafts for a 1B shape.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from loadtests.common.benchmark import listed, table, usable_cores
from loadtests.engine import process
from loadtests.engine.drafts.models import DRAFT, TARGET, agreeing
from loadtests.engine.drafts.rounds import TIMEOUT_S, Round, run_round
from serve_app.engine import EngineOptions

_N_CTX_SLOT = 512
_HEADER = (
    "streams",
    "without, tokens/s",
    "with",
    "ratio",
    "proposed",
    "right",
    "draft's part of time",
)


def main() -> int:
    """Measure, and print a table."""
    args = _arguments()
    target = args.target or agreeing(args.folder, TARGET, args.target_type)
    draft = args.draft or agreeing(args.folder, DRAFT, args.draft_type)
    rows = []
    for n_streams in args.streams:
        found = _measure(target, draft, n_streams, args)
        ratio = statistics.median(b.tokens_per_s / a.tokens_per_s for a, b in found)
        plain, drafted = (statistics.median(pair[i].tokens_per_s for pair in found) for i in (0, 1))
        with_draft = [pair[1] for pair in found]
        rows.append(
            (
                str(n_streams),
                f"{plain:.1f}",
                f"{drafted:.1f}",
                f"{ratio:.2f}",
                str(sum(one.proposed for one in with_draft)),
                str(sum(one.right for one in with_draft)),
                f"{statistics.median(one.draft_part for one in with_draft):.0%}",
            )
        )
    print(f"{target.name}, draft {draft.name}, {args.threads} threads:\n")
    print(table(_HEADER, rows))
    return 0


def _measure(
    target: Path, draft: Path, n_streams: int, args: argparse.Namespace
) -> list[tuple[Round, Round]]:
    """Pairs of rounds, without and with the draft; the first pair warms up."""
    pools = [
        process.started(
            target,
            EngineOptions(
                n_slots=n_streams,
                n_ctx_slot=_N_CTX_SLOT,
                threads=args.threads,
                speculate=False,
                draft=one,
            ),
        )
        for one in (None, draft)
    ]
    asked = n_streams, args.prompt_tokens, args.tokens
    try:
        found = []
        for _ in range(1 + args.rounds):
            without, beside = (pool.submit(run_round, *asked).result(TIMEOUT_S) for pool in pools)
            found.append((without, beside))
        return found[1:]
    finally:
        for pool in pools:
            pool.shutdown()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.engine.drafts", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--target", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--streams", type=listed(int), default=[1, 16])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--target-type", default="q8_0")
    parser.add_argument("--draft-type", default="q4_0")
    parser.add_argument("--folder", type=Path, default=Path("build/drafts"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
