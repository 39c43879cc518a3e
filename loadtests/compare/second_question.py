"""Measures how soon the second question of a long chat has its first text, in Corral and its peers.

    python -m loadtests.compare.second_question --model PATH [--sides openvino,corral,llama-server]
        [--words 4000] [--question-words 12] [--rounds 5] [--threads N] [--server PATH] [--json FILE]

Each round has a fresh chat. Its first message has --words words, each of them a token, and the second
question --question-words. A server computes what is not in its cache: the question, what the chat template
puts around it, and the answer from where its text gives other tokens than those that were generated.

All sides are started and warmed up, and then take turns, round by round: A B C, C B A, ... One runs at a
time; the processes of all others are stopped meanwhile (SIGSTOP). Times are those that the client sees.

Progress goes to stderr, a Markdown table to stdout, every single time to the JSON file.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from loadtests.common.benchmark import (
    SEED,
    BenchmarkError,
    absolute,
    bounded,
    choice,
    listed,
    machine_and_model,
    spread,
    table,
    usable_cores,
)
from loadtests.common.rounds import in_turns, of_each, ratio_spread
from loadtests.common.servers import Server, exit_on_sigterm
from loadtests.common.streams import Answer, Reader
from loadtests.compare import llama_server
from loadtests.compare.requests import read_words
from loadtests.compare.sides import CORRAL, LLAMA_SERVER, NATIVE, OPENVINO, Sizes, start

REST_S = 5.0
"""Seconds in which the user thinks, and a server may do what it puts off until nobody waits."""
_TIMEOUT_S = 300.0
_ANSWER = 2
"""Tokens: a model with random weights writes what is read again as other tokens."""
_ROOM = 512
"""Tokens of a slot behind the first message."""
_HEADER = ("side", "first question, s", "second, ms", "ratio", "computed tokens of the second")

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Found:
    """One chat's times to the first text, in seconds."""

    first_s: float
    second_s: float
    computed: int
    """Prompt tokens of the second question that were in no cache."""


def measure(args: argparse.Namespace) -> list[dict[str, Found]]:
    """All rounds, each with every side."""
    words = list(read_words(args.model).tokens.values())
    sizes = Sizes(args.threads, n_slots=2, n_ctx_slot=args.words + _ROOM)
    with ExitStack() as opened:
        servers: dict[str, Server] = {}
        for side in args.sides:
            servers[side] = opened.enter_context(start(side, args.model, sizes, args.server))
            servers[side].pause()

        def chat(number: int, side: str) -> Found:
            rng = random.Random(f"{SEED} {number} second question")
            texts = ["".join(rng.choices(words, k=n)) for n in (args.words, args.question_words)]
            servers[side].go_on()
            found = _chat(servers[side].url, *texts)
            servers[side].pause()
            print(
                f"round {number}, {side}: {json.dumps(asdict(found))}", file=sys.stderr, flush=True
            )
            return found

        return in_turns(args.sides, args.rounds, chat)


def _chat(url: str, long: str, question: str) -> Found:
    with httpx.Client(base_url=url, timeout=_TIMEOUT_S) as client:
        time.sleep(REST_S)
        messages: Messages = [{"role": "user", "content": long}]
        first, text = _ask(client, messages)
        time.sleep(REST_S)
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": question},
        ]
        second, _ = _ask(client, messages)
    computed = (second.prompt_tokens or 0) - (second.cached_tokens or 0)
    return Found(first.pieces_s[0], second.pieces_s[0], computed)


def _ask(client: httpx.Client, messages: Messages) -> tuple[Answer, str]:
    body: dict[str, Any] = {
        "messages": messages,
        "max_tokens": _ANSWER,
        "ignore_eos": True,
        "seed": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    reader = Reader()
    began = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        for data in response.iter_raw():
            reader.feed(time.perf_counter() - began, data)
    answer = reader.answer()
    if answer.error or not answer.pieces_s:
        raise BenchmarkError(f"{client.base_url} gave no answer: {answer.error}")
    return answer, reader.text


def report(args: argparse.Namespace, rounds: Sequence[Mapping[str, Found]]) -> str:
    """A line of facts, and the table. Ratios are to llama-server, or else to the first side."""
    facts = machine_and_model(args.model)
    baseline = LLAMA_SERVER if LLAMA_SERVER in args.sides else args.sides[0]
    others = [one[baseline].second_s for one in rounds]
    rows = [
        (
            side,
            spread([one.first_s for one in found]),
            spread([1000 * one.second_s for one in found]),
            ratio_spread([one.second_s for one in found], others),
            f"{statistics.median(one.computed for one in found):.0f}",
        )
        for side, found in of_each(rounds)
    ]
    return "\n".join(
        [
            "{cpu}, {cores} cores, {model} ({model_mb} MB).".format(**facts),
            f"A first message of {args.words} words, a second question of {args.question_words}.",
            "",
            table(_HEADER, rows),
        ]
    )


def main() -> None:
    """Measure, print the table, write the file."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.compare.second_question", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=absolute, required=True)
    sides = (OPENVINO, CORRAL, LLAMA_SERVER)
    parser.add_argument("--sides", type=listed(choice(*NATIVE)), default=sides)
    parser.add_argument("--words", type=bounded(16, 30_000), default=4000)
    parser.add_argument("--question-words", type=bounded(1, 1000), default=12)
    parser.add_argument("--rounds", type=bounded(1, 50), default=5)
    parser.add_argument("--threads", type=bounded(1, 512), default=usable_cores())
    parser.add_argument("--server", type=absolute, default=llama_server.folder() / "llama-server")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    rounds = measure(args)
    print(report(args, rounds))
    if args.json is not None:
        found = [{side: asdict(one) for side, one in of.items()} for of in rounds]
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    exit_on_sigterm()
    main()
