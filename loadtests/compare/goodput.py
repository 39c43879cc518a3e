"""Goodput over HTTP: the requests per second that were answered as fast as their users expect.

    python -m loadtests.compare.goodput --model PATH [--rates 0.5,1,2,4] [--length short|medium|long]
        [--sides corral,llama-server] [--rounds 5] [--seconds 30] [--slots 16] [--threads N]
        [--engine '{"backend": "auto"}'] [--server PATH] [--json FILE] [--plot FILE.svg]

The load is open: requests arrive by a Poisson process at each of --rates for --seconds, whatever became of
those before. A request is good if it is answered in full, its first text came within 2 s (5 s behind 4,096
tokens) and 99% of its gaps are under 200 ms. A refusal is not good. Prompts begin anywhere in "Alice's
Adventures in Wonderland", so that no two begin alike: `short` ones have 128 tokens and 64 of answer,
`medium` ones 1,024 and 128, `long` ones 4,096 and 256. All answers have their full length.

Sides are those of `loadtests.compare`. All servers are started and warmed up once. They take turns, round
by round and rate by rate; one runs at a time, and the processes of all others are stopped meanwhile
(SIGSTOP). All sides of a round get the same prompts at the same times. Every request is read to its end
before the next side's turn. A side's best goodput is that of its best rate; the ratio is to llama-server's
best in the same round.

Progress goes to stderr, a Markdown table to stdout, every single answer to the JSON file.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtests.common import bursts
from loadtests.common.bursts import Burst
from loadtests.common.comparing import absolute, ratio_spread
from loadtests.common.plot import Chart, svg
from loadtests.common.servers import Server, exit_on_sigterm
from loadtests.compare import llama_server
from loadtests.compare.requests import request, tokenized
from loadtests.compare.sides import (
    CORRAL,
    LLAMA_SERVER,
    NATIVE,
    Sizes,
    engine_settings,
    expect,
    start,
)
from serve_app.cli.measure.benchmark import (
    SEED,
    choice,
    in_turns,
    list_of,
    machine_and_model,
    number_between,
    of_each,
    percentile,
    spread,
    table,
    usable_cores,
)
from serve_app.cli.measure.outcomes import StreamedAnswer

LENGTHS = {"short": (128, 64), "medium": (1024, 128), "long": (4096, 256)}
"""Tokens of a prompt, and of its answer."""
MOST_GAP_S = 0.2
TEXT = (Path(__file__).parents[1] / "common" / "alice.txt").read_text()
REST_S = 3.0
"""Seconds in which a server may do what it puts off until nobody waits."""

Goodput = dict[float, Burst]
"""A side's answers at each rate, in one round."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one invocation."""

    model: Path
    rates: tuple[float, ...]
    length: str
    sides: tuple[str, ...]
    rounds: int
    seconds: int
    slots: int
    threads: int
    server: Path
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> Sizes:
        """Every side's."""
        n_prompt, n_answer = LENGTHS[self.length]
        return Sizes(self.threads, self.slots, n_ctx_slot=n_prompt + n_answer + 256)

    @property
    def most_ttft_s(self) -> float:
        """The longest time to a good request's first text."""
        return 5.0 if LENGTHS[self.length][0] >= 4096 else 2.0


def is_good(answer: StreamedAnswer, settings: Settings) -> bool:
    """Whether it is whole and came as fast as its user expects."""
    if answer.error or answer.ttft_s is None or answer.tokens < LENGTHS[settings.length][1]:
        return False
    return answer.ttft_s <= settings.most_ttft_s and percentile(answer.gaps_s, 99) <= MOST_GAP_S


def goodput(burst: Burst, settings: Settings) -> float:
    """Good requests for each second in which requests arrived."""
    return sum(is_good(answer, settings) for answer in burst.answers) / settings.seconds


def arrivals_s(rate: float, seconds: int, number: int) -> list[float]:
    """The moments of a Poisson process of that rate: the same whenever they are asked for."""
    rng = random.Random(f"{SEED} {number} {rate} arrivals")
    times: list[float] = []
    now = rng.expovariate(rate)
    while now < seconds:
        times.append(now)
        now += rng.expovariate(rate)
    return times


def bodies(
    text: Sequence[int], n_requests: int, settings: Settings, seed: str
) -> list[dict[str, Any]]:
    """Requests whose prompts begin at places of the text that are drawn."""
    rng = random.Random(f"{SEED} {seed} prompts")
    n_prompt, n_answer = LENGTHS[settings.length]
    circle = [*text] * (2 + n_prompt // len(text))
    starts = (rng.randrange(len(text)) for _ in range(n_requests))
    return [
        request(tuple(circle[begin : begin + n_prompt]), number) | {"max_tokens": n_answer}
        for number, begin in enumerate(starts)
    ]


def measure(settings: Settings) -> list[dict[str, Goodput]]:
    """All rounds, each with every side."""
    text = tokenized(settings.model, TEXT)
    waiting = {"max_waiting": 256, "max_first_token_s": bursts.TIMEOUT_S}
    with ExitStack() as opened:
        servers: dict[str, Server] = {}
        for side in settings.sides:
            servers[side] = opened.enter_context(
                start(
                    *(side, settings.model, settings.sizes, settings.server),
                    waiting | dict(settings.engine),
                )
            )
            bursts.run(servers[side].url, bodies(text, 2, settings, "warm-up"))
            servers[side].pause()

        def run(number: int, way: tuple[float, str]) -> Burst:
            rate, side = way
            times = arrivals_s(rate, settings.seconds, number)
            sent = bodies(text, len(times), settings, f"{number} {rate}")
            servers[side].go_on()
            time.sleep(REST_S)
            burst = bursts.run_at(servers[side].url, sent, times)
            servers[side].pause()
            said = f"round {number}, {rate:g}/s, {side}: {goodput(burst, settings):.2f} good/s"
            print(f"{said} of {len(times)} requests", file=sys.stderr, flush=True)
            return burst

        ways = [(rate, side) for rate in settings.rates for side in settings.sides]
        rounds = in_turns(ways, settings.rounds, run, warm_up=False)
    return [
        {side: {rate: of_way[rate, side] for rate in settings.rates} for side in settings.sides}
        for of_way in rounds
    ]


# -- the report ----------------------------------------------------------------------------------


def report(settings: Settings, rounds: Sequence[Mapping[str, Goodput]]) -> str:
    """A line of facts, and the table."""
    n_prompt, n_answer = LENGTHS[settings.length]
    lines = [
        "{cpu}, {cores} cores, {model} ({model_mb} MB).".format(
            **machine_and_model(settings.model)
        ),
        f"Prompts of {n_prompt} tokens, {n_answer} of answer, for {settings.seconds} s at each rate. Good "
        f"are first texts within {settings.most_ttft_s:g} s and gaps whose p99 is at most "
        f"{1000 * MOST_GAP_S:.0f} ms. Rounds: {settings.rounds}, medians (min-max).",
    ]
    if settings.engine:
        lines += [f"Corral's engine has {json.dumps(settings.engine)}."]
    header = ("side", *(f"{rate:g}/s" for rate in settings.rates), "best", "ratio")
    baseline = [best(one.get(LLAMA_SERVER, one[settings.sides[0]]), settings) for one in rounds]
    rows = []
    for side, of_side in of_each(rounds):
        bests = [best(one, settings) for one in of_side]
        cells = [
            spread([goodput(one[rate], settings) for one in of_side]) for rate in settings.rates
        ]
        rows.append((side, *cells, spread(bests), ratio_spread(bests, baseline)))
    return "\n".join([*lines, "", table(header, rows)])


def best(of_side: Goodput, settings: Settings) -> float:
    """The goodput of its best rate."""
    return max(goodput(burst, settings) for burst in of_side.values())


def plot(settings: Settings, rounds: Sequence[Mapping[str, Goodput]]) -> str:
    """The curve of each side, as SVG."""
    lines = {
        side: [
            statistics.median(goodput(one[rate], settings) for one in of_side)
            for rate in settings.rates
        ]
        for side, of_side in of_each(rounds)
    }
    chart = Chart("good requests per second", [f"{rate:g}" for rate in settings.rates], lines)
    return svg(f"{settings.model.name}, {settings.length}", "requests per second", [chart])


# -- the command line ----------------------------------------------------------------------------


def _rate(text: str) -> float:
    rate = float(text)
    if not 0.01 <= rate <= 100:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.01 and 100.")
    return rate


def parse_args(argv: Sequence[str] | None) -> tuple[Settings, Path | None, Path | None]:
    """The settings, and where the JSON and the plot go."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.compare.goodput", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=absolute, required=True)
    parser.add_argument("--rates", type=list_of(_rate), default=(0.5, 1.0, 2.0, 4.0))
    parser.add_argument("--length", choices=LENGTHS, default="short")
    parser.add_argument("--sides", type=list_of(choice(*NATIVE)), default=(CORRAL, LLAMA_SERVER))
    parser.add_argument("--rounds", type=number_between(1, 50), default=5)
    parser.add_argument("--seconds", type=number_between(5, 600), default=30)
    parser.add_argument("--slots", type=number_between(1, 64), default=16)
    parser.add_argument("--threads", type=number_between(1, 512), default=usable_cores())
    llama_server.add_option(parser)
    parser.add_argument("--engine", type=engine_settings, default={})
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None)
    args = vars(parser.parse_args(argv))
    json_file, plot_file = args.pop("json"), args.pop("plot")
    settings = Settings(**args)
    expect(parser, settings.sides, settings.model, settings.server)
    return settings, json_file, plot_file


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the files."""
    settings, json_file, plot_file = parse_args(argv)
    rounds = measure(settings)
    print(report(settings, rounds))
    if json_file is not None:
        sides = [
            {side: {rate: asdict(burst) for rate, burst in of.items()} for side, of in one.items()}
            for one in rounds
        ]
        document = {"machine": machine_and_model(settings.model), "rounds": sides}
        json_file.write_text(json.dumps(document, indent=1) + "\n")
    if plot_file is not None:
        plot_file.write_text(plot(settings, rounds))


if __name__ == "__main__":
    exit_on_sigterm()
    main()
