"""Hostile clients: attacks on a server that is started for them, while honest users stream.

    python -m loadtests.hostile [--short | --brief] [--only FAMILY,...] [--names NAME,...] [--users 4]
        [--seconds 6] [--most 60] [--json FILE] [--list]

`loadtests.hostile.search` draws requests, and looks for those that cost others time.

Prints a table: what honest users saw in the calm before each attack and during it, what the attacker got,
which processes died, and how memory grew; then a verdict. The exit status is 1 if anybody was hurt.
Everything is on loopback, and each attack is bounded in requests and in time. Progress goes to stderr.

The models that attacks need are made at the first run, and kept in ~/.cache/corral/hostile.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

from loadtests.common.servers import exit_on_sigterm
from loadtests.hostile import report
from loadtests.hostile.attack import Attack
from loadtests.hostile.attacks import ATTACKS, FAMILIES
from loadtests.hostile.run import Plan, run
from loadtests.hostile.setups import HONEST
from loadtests.hostile.verdict import HURT, Result
from serve_app.cli.measure.benchmark import choice, cpu_name, list_of, number_between, usable_cores

CALM_S, SHORT_CALM_S, SHORT_MOST_S, BRIEF_MOST_S = 6, 3, 10.0, 7.0


def chosen(families: Sequence[str], names: Sequence[str], *, short: bool) -> list[Attack]:
    """The attacks to make: all of them, or those of these families and names, or of the short form."""
    return [
        attack
        for attack in ATTACKS
        if (not families or attack.family in families)
        and (not names or attack.name in names)
        and (attack.is_short or not short)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.hostile", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", type=list_of(choice(*FAMILIES)), default=(), help="families")
    names = list_of(choice(*(attack.name for attack in ATTACKS)))
    parser.add_argument("--names", type=names, default=(), help="attacks by name")
    parser.add_argument("--short", action="store_true", help="some attacks: about three minutes")
    parser.add_argument("--brief", action="store_true", help="all attacks in less than 20 minutes")
    parser.add_argument(
        "--users", type=number_between(1, len(HONEST)), default=4, help="honest ones"
    )
    parser.add_argument("--seconds", type=number_between(2, 600), help="of calm before each attack")
    parser.add_argument("--most", type=number_between(2, 600), help="seconds of an attack")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    parser.add_argument("--list", action="store_true", help="print the attacks, and make none")
    args = parser.parse_args(argv)
    attacks = chosen(args.only, args.names, short=args.short)
    if args.list:
        print("\n".join(f"{one.family}: {one.name}. {one.what} {one.expects}" for one in attacks))
        return 0
    calm_s = args.seconds or (SHORT_CALM_S if args.short or args.brief else CALM_S)
    results: list[Result] = []

    def tell(result: Result) -> None:
        results.append(result)
        print(report.line(result), file=sys.stderr)
        if args.json:  # what there is, should this be interrupted
            args.json.write_text(json.dumps(report.document(results, _facts(args.users)), indent=1))

    usual_s = BRIEF_MOST_S if args.brief else SHORT_MOST_S if args.short else inf
    run(
        attacks,
        Plan(calm_s, calm_s, args.users, args.most or usual_s, 2 if args.brief else 3),
        tell,
    )
    print(report.table(results), report.summary(results), sep="\n\n")
    return int(any(result.verdict == HURT for result in results))


def _facts(users: int) -> dict[str, Any]:
    return {"cpu": cpu_name(), "cores": usable_cores(), "honest_users": users}


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
