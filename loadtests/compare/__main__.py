"""Corral and its peers over HTTP, as their users run them, on the same machine with the same model.

    python -m loadtests.compare --model PATH [--workloads shared,independent] [--users 1,4,8,16]
        [--rounds 3] [--sides corral,ray,llama-server] [--threads N] [--server PATH]
        [--slots N] [--engine '{"kv_unified": true}'] [--json FILE]

Sides: `corral` is what `corral serve` runs, `ray` the same with --cluster, `llama-server` the one of
--server, or of `python -m loadtests.compare.llama_server`. Others that may be named:

- `serve-run`: `serve run` with `serve_app/cluster/one-machine.env` and `proxy_location: Disabled`, as in
  `serve_config.yaml`; `serve-proxy` the same with Serve's own proxy; `ray-defaults` without the settings;
- `openvino`: what `corral serve` runs, with `engine.backend: openvino`; `openvino-bf16` the same with
  `engine.cache_type_k` and `engine.cache_type_v` as `bf16`, `openvino-w8a8` with
  `engine.quantization: w8a8`;
- `vllm`: vLLM's CPU build with weights as W8A8, of `python -m loadtests.compare.vllm`; `vllm-bf16` the same
  with BF16;
- `llama-cpp-python`: `python -m llama_cpp.server`, which computes one request after the other (with
  --interrupt_requests False: by default a request cuts off the stream before it);
- `llama-cpp-python-batched`: the example server of its source package, kept by
  `loadtests.compare.llama_server`;
- http://HOST:PORT: any OpenAI server that runs already, with the first of its models. It is neither
  started nor stopped, and what it keeps from before is its own.

Each that is started has 16 slots of 1024 tokens, or --slots; `llama-cpp-python` has one. With --engine,
Corral's have these settings of `engine` besides. Users all ask at once and read streams of 64 tokens.
`independent` prompts have 128 random words, `shared` ones 512 that are the same for all users and 32 of
their own; each word is one token. Corral, llama-server and vLLM get prompts as token ids, with
`ignore_eos`; the others as text, with a `logit_bias` against what ends an answer. Where a stream does not
tell its tokens, its texts are counted. A side that answered less than it should is warned of.

In every round each side's server is started and warmed up with a request. Then they take turns, burst by
burst: A B C, C B A, ... One runs at a time; the processes of all others are stopped meanwhile (SIGSTOP). A
machine that others use as well changes its speed from minute to minute: what is compared must be close
together. All sides of a round get the same prompts, and every round and every number of users fresh ones,
so that no cache helps but within a burst; before each burst there is a rest of REST_S. Ratios are to
llama-server in the same round, or, without it, to the side that is named first. TTFT is the time to the
first text, ITL the gaps between texts, as the client sees them. "Beside" is the CPU time of a server's
processes for each token, without the busiest threads, as many as --threads: those that compute the model.

Progress goes to stderr, Markdown tables to stdout, and every single answer to the JSON file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from loadtests.common import bursts
from loadtests.common.bursts import Burst
from loadtests.common.comparing import absolute
from loadtests.common.processes import tagged
from loadtests.common.servers import Server, exit_on_sigterm
from loadtests.common.thread_time import beside_compute_s, thread_times
from loadtests.compare import llama_server
from loadtests.compare import report as peer_report
from loadtests.compare.requests import (
    MAX_TOKENS,
    WORKLOADS,
    Words,
    draw_prompts,
    openai_request,
    read_words,
    request,
    seed,
)
from loadtests.compare.sides import (
    CORRAL,
    LLAMA_SERVER,
    NATIVE,
    RAY,
    SIDES,
    Sizes,
    engine_settings,
    expect,
    first_model,
    is_url,
    start,
)
from serve_app.cli.measure.benchmark import (
    choice,
    list_of,
    machine_and_model,
    number_between,
    turns,
    usable_cores,
)

REST_S = 5.0
"""Seconds in which a server may do what it puts off until nobody waits."""
MAX_USERS, MAX_SLOTS = 256, 64


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one invocation."""

    model: Path
    workloads: tuple[str, ...]
    users: tuple[int, ...]
    rounds: int
    sides: tuple[str, ...]
    threads: int
    server: Path
    slots: int = 16
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def points(self) -> list[tuple[str, int]]:
        """The bursts of every side in every round: workload and users."""
        return [(workload, users) for workload in self.workloads for users in self.users]

    @property
    def sizes(self) -> Sizes:
        """Every side's."""
        return Sizes(self.threads, self.slots)

    @property
    def corral(self) -> dict[str, Any]:
        """Settings of Corral's engine besides; all users may wait, as they may elsewhere."""
        waiting = max(2 * self.slots, max(self.users) - self.slots)
        return {"max_waiting": waiting, "max_first_token_s": bursts.TIMEOUT_S} | dict(self.engine)


@dataclass(frozen=True, slots=True)
class Record:
    """One burst, and which it was."""

    round: int
    side: str
    workload: str
    users: int
    burst: Burst


def requests(
    side: str, url: str, words: Words, number: int, point: tuple[str, int]
) -> list[dict[str, Any]]:
    """The requests of a round's burst to that side's server."""
    prompts = enumerate(draw_prompts(list(words.tokens), number, *point))
    if side in NATIVE:
        return [request(prompt, i) for i, prompt in prompts]
    model = first_model(url)
    return [openai_request(prompt, i, words, model) for i, prompt in prompts]


def measure(settings: Settings) -> Iterator[Record]:
    """Every burst, as it ends."""
    words = read_words(settings.model)
    for number in range(1, settings.rounds + 1):
        with ExitStack() as servers:
            paused = {s: servers.enter_context(_warm(s, settings, words)) for s in settings.sides}
            for i, point in enumerate(settings.points, number - 1):
                for side in turns(settings.sides, i):
                    url = paused[side].url
                    bodies = requests(side, url, words, number, point)
                    with _awake(paused[side]):
                        burst = _timed(paused[side], settings.threads, bodies)
                    yield Record(number, side, *point, burst)


def _timed(server: Server, threads: int, bodies: Sequence[Mapping[str, Any]]) -> Burst:
    """A burst, with the CPU time of the server's other threads than so many that compute."""
    if server.directory is None:
        return bursts.run(server.url, bodies)
    before = thread_times(tagged(server.directory))
    burst = bursts.run(server.url, bodies)
    after = thread_times(tagged(server.directory))
    return replace(burst, beside_cpu_s=beside_compute_s(before, after, threads))


@contextmanager
def _warm(side: str, settings: Settings, words: Words) -> Iterator[Server]:
    """That side's server, which has answered a request and is paused."""
    with start(side, settings.model, settings.sizes, settings.server, settings.corral) as server:
        bursts.run(server.url, requests(side, server.url, words, 0, ("independent", 1)))
        server.pause()
        yield server


@contextmanager
def _awake(server: Server) -> Iterator[None]:
    """Inside the block the server goes on; before, it has had a rest."""
    server.go_on()
    time.sleep(REST_S)
    try:
        yield
    finally:
        server.pause()


def by_point(
    records: Sequence[Record], settings: Settings
) -> dict[str, dict[int, list[dict[str, Burst]]]]:
    """The rounds of each workload and number of users; in them, the sides as the settings order them."""
    found = {(r.round, r.side, r.workload, r.users): r.burst for r in records}
    return {
        workload: {
            users: [
                {side: found[number, side, workload, users] for side in settings.sides}
                for number in range(1, settings.rounds + 1)
            ]
            for users in settings.users
        }
        for workload in settings.workloads
    }


def facts(settings: Settings) -> dict[str, Any]:
    """The facts that the figures depend on."""
    found = machine_and_model(settings.model) | {
        "versions": {name: version(name) for name in ("corral", "llama-cpp-python", "ray")},
        "sizes": asdict(settings.sizes),
        "engine": settings.engine,
        "workloads": {name: WORKLOADS[name] for name in settings.workloads},
        "max_tokens": MAX_TOKENS,
        "models": {side: first_model(side) for side in settings.sides if is_url(side)},
    }
    if LLAMA_SERVER in settings.sides:
        found["versions"][LLAMA_SERVER] = _version_of(settings.server)
    return found


def _version_of(server: Path) -> str:
    done = subprocess.run([server, "--version"], capture_output=True, text=True, timeout=60)
    said = [line for line in (done.stderr + done.stdout).splitlines() if "version" in line]
    return said[0] if said else "unknown"


def report(facts: dict[str, Any], records: Sequence[Record], settings: Settings) -> str:
    """A line of facts, a table for each workload, and what to beware of."""
    lines = [
        "{cpu}, {cores} cores, {model} ({model_mb} MB), {max_tokens} tokens for each user.".format(
            **facts
        ),
        f"Rounds: {settings.rounds}. Medians, and ratios to {peer_report.baseline(settings.sides)} in "
        "the same round: median (min-max).",
        f"The client used {max(record.burst.client_share for record in records):.1%} of a core at most.",
    ]
    lines += [f"{url} serves {model}." for url, model in facts["models"].items()]
    if facts["engine"]:
        lines += [f"Corral's engine has {json.dumps(facts['engine'])}."]
    results = by_point(records, settings)
    for workload, of_workload in results.items():
        n_shared, n_own = WORKLOADS[workload]
        lines += [f"\n{workload}: {n_shared} shared tokens, {n_own} of their own\n"]
        lines += [peer_report.table(of_workload)]
    beware = [*_uncounted(records), *_warnings(results)]
    return "\n".join([*lines, *(f"\nWARNING: {text}" for text in beware)])


def _uncounted(records: Sequence[Record]) -> Iterator[str]:
    for side in dict.fromkeys(record.side for record in records):
        answers = [a for record in records if record.side == side for a in record.burst.answers]
        if not all(answer.counted for answer in answers):
            yield f"{side} does not count all its tokens: events with text are counted instead"


def _warnings(results: dict[str, dict[int, list[dict[str, Burst]]]]) -> Iterator[str]:
    for workload, of_workload in results.items():
        for users, rounds in of_workload.items():
            wanted = [(sum(WORKLOADS[workload]), MAX_TOKENS)] * users
            for number, one in enumerate(rounds, 1):
                for text in peer_report.warnings(one, wanted):
                    yield f"{workload}, {users} users, round {number}: {text}"


def _progress(record: Record) -> None:
    figures = ", ".join(f"{name} {value:.2f}" for name, value in record.burst.figures().items())
    print(
        f"round {record.round}, {record.side}, {record.workload}, {record.users} users: {figures}; "
        f"{record.burst.tokens} tokens, client {record.burst.client_share:.1%} of a core",
        file=sys.stderr,
        flush=True,
    )


def _sides(text: str) -> tuple[str, ...]:
    sides = tuple(dict.fromkeys(side.rstrip("/") for side in text.split(",")))
    if unknown := [side for side in sides if side not in SIDES and not is_url(side)]:
        known = ", ".join((*SIDES, "http://HOST:PORT"))
        raise argparse.ArgumentTypeError(f"{unknown} not among {known}.")
    return sides


def parse_args(argv: Sequence[str] | None) -> tuple[Settings, Path | None]:
    """The settings, and where the JSON goes."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.compare", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    user_count = number_between(1, MAX_USERS)
    parser.add_argument("--model", type=absolute, required=True)
    parser.add_argument("--workloads", type=list_of(choice(*WORKLOADS)), default=tuple(WORKLOADS))
    parser.add_argument("--users", type=list_of(user_count), default=(1, 4, 8, 16))
    parser.add_argument("--rounds", type=number_between(1, 50), default=3)
    parser.add_argument("--sides", type=_sides, default=(CORRAL, RAY, LLAMA_SERVER))
    parser.add_argument("--threads", type=number_between(1, 512), default=usable_cores())
    parser.add_argument("--slots", type=number_between(1, MAX_SLOTS), default=16)
    llama_server.add_option(parser)
    parser.add_argument("--engine", type=engine_settings, default={})
    parser.add_argument("--json", type=Path, default=None)
    args = vars(parser.parse_args(argv))
    json_file: Path | None = args.pop("json")
    settings = Settings(**args)
    expect(parser, settings.sides, settings.model, settings.server)
    return settings, json_file


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write the JSON."""
    settings, json_file = parse_args(argv)
    known, records = facts(settings), []
    for record in measure(settings):
        _progress(record)
        records.append(record)
    print(report(known, records, settings))
    if json_file is not None:
        json_file.write_text(json.dumps(_document(known, records), indent=1) + "\n")


def _document(facts: dict[str, Any], records: Sequence[Record]) -> dict[str, Any]:
    runs = [
        {"round": r.round, "side": r.side, "workload": r.workload, "users": r.users}
        | {"seed": seed(r.round, r.workload, r.users)}
        | r.burst.raw()
        for r in records
    ]
    return {"machine": facts, "runs": runs}


if __name__ == "__main__":
    exit_on_sigterm()
    main()
