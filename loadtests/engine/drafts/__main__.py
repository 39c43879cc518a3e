"""Measures what drafts gain or cost: of a model that is always right or never, or from the text. No Ray.

    python -m loadtests.engine.drafts [--wrong | --lookup] [--temperature 0]
        [--target PATH --draft PATH] [--streams 1,4,16] [--tokens 96] [--prompt-tokens 32] [--rounds 5]
        [--threads N] [--target-type q8_0] [--draft-type q4_0] [--folder build/drafts]

The engine with the draft and the engine without it have a process each, with slots for the most streams,
and take turns. Both have the same kind of cache and begin with the same profile. Lookup is off in both;
with --lookup it is the only difference. Small models write text that repeats itself at temperature 0, and
text that does not at temperature 1. Without files, models with random weights are made (`models`): a 0.6B
shape drafts for a 1B shape.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from loadtests.engine.drafts.models import DRAFT, TARGET, agreeing, random
from loadtests.engine.drafts.rounds import TIMEOUT_S, Round, run_round
from serve_app.cli.measure import process
from serve_app.cli.measure.benchmark import (
    in_turns,
    list_of,
    machine,
    machine_line,
    spread,
    table,
    usable_cores,
)
from serve_app.engine import Engine, EngineOptions

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
_WITHOUT, _WITH = "without", "with"


def main() -> int:
    """Measure, and print a table."""
    args = _arguments()
    target = args.target or agreeing(args.folder, TARGET, args.target_type)
    profiles = tempfile.TemporaryDirectory()
    usual = EngineOptions(
        n_slots=max(args.streams),
        n_ctx_slot=_N_CTX_SLOT,
        threads=args.threads,
        flash_attn=True,
        kv_unified=False,
        speculate=False,
        profile_folder=Path(profiles.name),
    )
    if args.lookup:
        name, changed = "from the text", replace(usual, speculate=True)
    else:
        made = random if args.wrong else agreeing
        draft = args.draft or made(args.folder, DRAFT, args.draft_type)
        name, changed = draft.name, replace(usual, draft=draft)
    pools = {
        way: process.start_process(Engine.load, target, options)
        for way, options in ((_WITHOUT, usual), (_WITH, changed))
    }
    try:
        rows = [_row(n_streams, _measure(pools, n_streams, args)) for n_streams in args.streams]
    finally:
        for pool in pools.values():
            pool.shutdown()
        profiles.cleanup()
    print(f"{machine_line(machine(target, args.threads))}; draft {name}:\n")
    print(table(_HEADER, rows))
    return 0


def _measure(
    pools: Mapping[str, ProcessPoolExecutor], n_streams: int, args: argparse.Namespace
) -> list[dict[str, Round]]:
    """Rounds, each without and with the draft."""

    def measure(number: int, way: str) -> Round:
        asked = n_streams, args.prompt_tokens, args.tokens, args.temperature
        found = pools[way].submit(run_round, *asked).result(TIMEOUT_S)
        print(f"round {number}, {n_streams} streams, {way}: {found}", file=sys.stderr, flush=True)
        return found

    return in_turns(list(pools), args.rounds, measure)


def _row(n_streams: int, rounds: list[dict[str, Round]]) -> tuple[str, ...]:
    drafted = [one[_WITH] for one in rounds]
    return (
        str(n_streams),
        *(f"{statistics.median(r[way].tokens_per_s for r in rounds):.1f}" for way in rounds[0]),
        spread([one[_WITH].tokens_per_s / one[_WITHOUT].tokens_per_s for one in rounds]),
        str(sum(one.proposed for one in drafted)),
        str(sum(one.right for one in drafted)),
        f"{statistics.median(one.draft_part for one in drafted):.0%}",
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.engine.drafts", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--wrong", action="store_true", help="a draft that is never right")
    kind.add_argument("--lookup", action="store_true", help="drafts from the text, without a model")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--streams", type=list_of(int), default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--target-type", default="q8_0")
    parser.add_argument("--draft-type", default="q4_0")
    parser.add_argument("--folder", type=Path, default=Path("build/drafts"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
