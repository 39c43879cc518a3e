"""Measures two models on one machine: what each gives while the other rests, and both together.

    python -m loadtests.compare.together --chat PATH (--embed PATH | --second PATH)
        [--sides turns,divided,alone,llama-server] [--cells chat-1,chat-4,other,both] [--rounds 5]
        [--seconds 8] [--engine '{"backend": "auto"}'] [--server PATH] [--json FILE]

Sides: `turns` is one Corral with both models as they are by default; `divided` the same with half of the
cores for each; `alone` a Corral for each model, so that nothing is shared; `llama-server` two of these with
all threads each. All are started once, and warmed up. They take turns, cell by cell; the processes of all
others are stopped meanwhile (SIGSTOP).

Cells: one or four streams of the chat model, whose prompts are cached; four clients of the other model;
both at once. These are clients with 16 texts each, or streams of a second chat model. What comes in the
first second does not count. Ratios are to `alone`, or else to the first side, in the same round. `shares`
is the sum of the two ratios. Progress goes to stderr, a Markdown table to stdout.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from loadtests.common.bursts import parse_answer
from loadtests.common.comparing import absolute
from loadtests.common.servers import (
    Server,
    corral_is_ready,
    exit_on_sigterm,
    is_healthy,
    local_command,
    running,
    write_config,
)
from loadtests.compare import llama_server
from loadtests.compare.sides import LLAMA_SERVER, Sizes, engine_settings, llama_server_command
from serve_app.cli.measure.benchmark import (
    SEED,
    choice,
    in_turns,
    list_of,
    machine_and_model,
    number_between,
    of_each,
    percentile,
    ratios,
    spread,
    table,
    usable_cores,
)

TURNS, DIVIDED, ALONE = "turns", "divided", "alone"
CHAT, OTHER = "chat", "other"
CELLS: Mapping[str, tuple[int, int]] = {
    "chat-1": (1, 0),
    "chat-4": (4, 0),
    "other": (0, 4),
    "both": (4, 4),
}
"""Clients of the chat model, and of the other one."""
ALICE = (Path(__file__).parents[1] / "common" / "alice.txt").read_text().split()
WARM_S, N_TEXTS, MAX_TOKENS = 1.0, 16, 128


@dataclass(frozen=True, slots=True)
class Side:
    """Where the two models of a side are."""

    chat: Server
    other: Server


@dataclass(slots=True)
class Figures:
    """What a cell gave."""

    tokens_per_s: float = 0.0
    """Of the chat model, as the two that follow."""
    other_per_s: float = 0.0
    """Texts, or tokens of the second chat model."""
    ttft_s: float = 0.0
    gap_s: float = 0.0
    """The 99th percentile of the time between two tokens of a stream."""


@dataclass(slots=True)
class Load:
    """Clients of a model that send one request after the other until a moment, and what they saw. Their
    threads."""

    until: float
    done: list[tuple[float, float]] = field(default_factory=list)
    """When tokens or texts were there, and how many."""
    gaps_s: list[float] = field(default_factory=list)
    ttfts_s: list[float] = field(default_factory=list)

    def stream(self, url: str, model: str, seed: str) -> None:
        """Ask for one answer after the other. Raises RuntimeError for a refusal, and for an answer that
        broke off."""
        body = {"model": model, "prompt": _words(random.Random(seed), 60), "stream": True}
        # Answers differ, or the server would draft each from the one before.
        body |= {"max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0.8}
        body |= {"stream_options": {"include_usage": True}}
        while (began := time.monotonic()) < self.until:
            body["seed"] = time.monotonic_ns() % 2**31
            lines = _post(url, "/v1/completions", body)
            answer = parse_answer([(time.monotonic() - began, line) for line in lines])
            if answer.error or not answer.pieces_s:
                raise RuntimeError(f"{url}: {answer.error or 'an answer without text'}")
            self.ttfts_s.append(answer.pieces_s[0])
            self.gaps_s += answer.gaps_s
            n_tokens = answer.tokens / len(answer.pieces_s)  # a piece may have several
            self.done += [(began + at, n_tokens) for at in answer.pieces_s]

    def embed(self, url: str, model: str, seed: str) -> None:
        """Have one list of texts embedded after the other. Raises RuntimeError for a refusal."""
        rng = random.Random(seed)
        while time.monotonic() < self.until:
            texts = [_words(rng, rng.randint(20, 60)) for _ in range(N_TEXTS)]
            for _ in _post(url, "/v1/embeddings", {"model": model, "input": texts}):
                pass
            self.done.append((time.monotonic(), N_TEXTS))


def _words(rng: random.Random, n: int) -> str:
    begin = rng.randrange(len(ALICE) - n)
    return " ".join(ALICE[begin : begin + n])


def _post(url: str, path: str, body: Mapping[str, Any]) -> Iterator[bytes]:
    """The lines of the answer, as they come."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{url}{path}: {answer.status} {answer.read()[:300]!r}")
        yield from answer
    finally:
        connection.close()


def measure(side: Side, cell: str, number: int, seconds: float, *, chats: bool) -> Figures:
    """Put the load of a cell on a side, whose other model `chats` too, or embeds. Raises RuntimeError if a
    request was refused."""
    began = time.monotonic() + WARM_S
    chat, other = Load(began + seconds), Load(began + seconds)
    n_streams, n_clients = CELLS[cell]
    ask = other.stream if chats else other.embed
    # Prompts of a chat model are cached, and texts to embed are not.
    seed = SEED if chats else f"{SEED} {number}"
    with ThreadPoolExecutor(n_streams + n_clients) as pool:
        clients = [
            pool.submit(chat.stream, side.chat.url, CHAT, f"chat {i}") for i in range(n_streams)
        ]
        clients += [
            pool.submit(ask, side.other.url, OTHER, f"{seed} {i}") for i in range(n_clients)
        ]
    for client in clients:
        client.result()
    chat_per_s, other_per_s = (
        sum(n for at, n in load.done if began <= at < load.until) / seconds
        for load in (chat, other)
    )
    if (n_streams and not chat_per_s) or (n_clients and not other_per_s):
        raise RuntimeError(f"{cell} brought nothing.")
    return Figures(
        chat_per_s,
        other_per_s,
        statistics.median(chat.ttfts_s) if chat.ttfts_s else 0.0,
        percentile(chat.gaps_s, 99) if chat.gaps_s else 0.0,
    )


@contextmanager
def start(side: str, args: argparse.Namespace) -> Iterator[Side]:
    """The servers of a side, which run inside the `with` block."""
    files = {CHAT: args.chat, OTHER: args.embed or args.second}
    half = {"threads": max(1, usable_cores() // 2)} if side == DIVIDED else {}
    entries = {
        name: {"id": name, "source": {"path": str(path)}, "engine": half | args.engine}
        for name, path in files.items()
    }

    def corral(*models: str) -> Any:
        chosen = [entries[model] for model in models]
        # Its engines share cores with no other server's.
        runtime = stack.enter_context(tempfile.TemporaryDirectory(prefix="corral-"))
        return running(
            lambda folder, port: local_command(write_config(folder, chosen, port)),
            corral_is_ready,
            {"XDG_RUNTIME_DIR": runtime},
        )

    def peer(model: str) -> Any:
        embeds = model == OTHER and args.embed
        kind = ["--embeddings", "--ubatch-size", "512"] if embeds else []
        sizes = Sizes(usable_cores(), 8)
        return running(
            lambda _, port: [*llama_server_command(args.server, files[model], sizes, port), *kind],
            is_healthy,
        )

    with ExitStack() as stack:
        if side in (TURNS, DIVIDED):
            server = stack.enter_context(corral(CHAT, OTHER))
            yield Side(server, server)
        else:
            one = corral if side == ALONE else peer
            yield Side(*(stack.enter_context(one(model)) for model in files))


def report(rounds: Sequence[Mapping[tuple[str, str], Figures]], sides: Sequence[str]) -> str:
    """The table: medians and ranges, and ratios in the same round."""
    measured = dict(of_each(rounds))
    base = ALONE if ALONE in sides else sides[0]
    rows = list[tuple[str, ...]]()
    for (side, cell), figures in measured.items():
        shares = list[list[float]]()
        for kind, name in enumerate(("tokens_per_s", "other_per_s")):
            if not CELLS[cell][kind]:
                continue
            alone = measured.get((base, ("chat-4", "other")[kind] if cell == "both" else cell), [])
            shares.append(_ratios(figures, alone, name))
            late = ["-", "-", "-"]
            if not kind:
                late = [
                    spread([1000 * one.ttft_s for one in figures]),
                    spread(_ratios(figures, alone, "ttft_s")),
                    spread([1000 * one.gap_s for one in figures]),
                ]
            per_s = spread([getattr(one, name) for one in figures])
            rows.append((side, cell, name, per_s, spread(shares[-1]), *late))
        if cell == "both" and all(shares):
            total = spread([sum(each) for each in zip(*shares, strict=True)])
            rows.append((side, cell, "shares", "-", total, "-", "-", "-"))
    what = ("side", "cell", "what", "median (range)", f"to {base}")
    return table((*what, "TTFT ms", f"to {base}", "gap p99 ms"), rows)


def _ratios(figures: Sequence[Figures], alone: Sequence[Figures], name: str) -> list[float]:
    """The ratios of the same rounds; none if there is nothing to compare with."""
    if not alone:
        return []
    values, others = ([getattr(one, name) for one in of] for of in (figures, alone))
    return ratios(values, others) or []


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The settings."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.compare.together", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--chat", type=absolute, required=True)
    other = parser.add_mutually_exclusive_group(required=True)
    other.add_argument("--embed", type=absolute)
    other.add_argument("--second", type=absolute)
    sides = (TURNS, DIVIDED, ALONE, LLAMA_SERVER)
    parser.add_argument("--sides", type=list_of(choice(*sides)), default=sides)
    parser.add_argument("--cells", type=list_of(choice(*CELLS)), default=tuple(CELLS))
    parser.add_argument("--rounds", type=number_between(1, 50), default=5)
    parser.add_argument("--seconds", type=number_between(2, 600), default=8)
    parser.add_argument("--engine", type=engine_settings, default={})
    llama_server.add_option(parser)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args(argv)
    if LLAMA_SERVER in args.sides:
        llama_server.expect(parser, args.server)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the file."""
    args = parse_args(argv)
    with ExitStack() as stack:
        started = {}
        for name in args.sides:
            started[name] = side = stack.enter_context(start(name, args))
            for server in {side.chat, side.other}:
                server.pause()

        def one(number: int, way: tuple[str, str]) -> Figures:
            side = started[way[0]]
            for server in {side.chat, side.other}:
                server.go_on()
            try:
                figures = measure(side, way[1], number, args.seconds, chats=args.second is not None)
            finally:
                for server in {side.chat, side.other}:
                    server.pause()
            print(number, *way, figures, file=sys.stderr, flush=True)
            return figures

        cells = [
            (side, cell)
            for cell in args.cells
            for side in args.sides
            if not (side == ALONE and cell == "both")
        ]
        rounds = in_turns(cells, args.rounds, one)
    print(report(rounds, args.sides))
    if args.json is not None:
        document = {
            "machine": machine_and_model(args.chat),
            "rounds": [
                {" ".join(way): asdict(figures) for way, figures in each.items()} for each in rounds
            ],
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    exit_on_sigterm()
    main()
