"""Honest users, in a process of their own: they chat, one request at a time, and write a journal.

    python -m loadtests.hostile.honest --url URL --users N --journal FILE

`CORRAL_API_KEYS` is a JSON object of their keys, by name; without, they give their names as `user`.
Somebody asks for /health besides, all the time: how long an answer takes says how long the server was busy
with something else. Runs until it is ended by a signal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

import gevent
from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPParseError

from loadtests.hostile import elsewhere
from loadtests.hostile.figures import probe_line
from loadtests.hostile.setups import DEMO, HONEST
from loadtests.load.stream_metrics import Slo
from loadtests.load.users.client import LoadClient
from serve_app.cli.measure.benchmark import number_between
from serve_app.cli.measure.users import CHAT, WORDS, Ask

API_KEYS = "CORRAL_API_KEYS"
THINK_S, PATIENCE_S = 0.15, 25.0
"""Between two questions; until a user hangs up, which counts as a failure."""
WORDS_ASKED, TOKENS_ANSWERED = 24, 40
PROBE_EVERY_S, PROBE_TIMEOUT_S = 0.05, 25.0


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.hostile.honest")
    parser.add_argument("--url", required=True)
    parser.add_argument("--users", type=number_between(1, len(HONEST)), default=4)
    parser.add_argument("--journal", type=Path, required=True)
    args = parser.parse_args(argv)
    elsewhere.set_niceness(elsewhere.FIRST)
    keys: dict[str, str] = json.loads(os.environ.get(API_KEYS, "{}"))
    with args.journal.open("w", buffering=1) as journal:
        users = [
            gevent.spawn(_chat, args.url, name, keys, journal) for name in HONEST[: args.users]
        ]
        gevent.joinall([*users, gevent.spawn(_probe, args.url, journal)], raise_error=True)


def question(name: str, rng: random.Random) -> Ask:
    """A user's next question, which was never asked before."""
    words = " ".join(rng.choices(WORDS, k=WORDS_ASKED))
    body = {
        "model": DEMO,
        "messages": [{"role": "user", "content": f"{words}?"}],
        "max_tokens": TOKENS_ANSWERED,
        "ignore_eos": True,
        "stream": True,
        "user": name,
    }
    return Ask(CHAT, body, THINK_S, leave_after_s=PATIENCE_S)


def _chat(url: str, name: str, keys: Mapping[str, str], journal: TextIO) -> None:
    headers = {"Authorization": f"Bearer {keys[name]}"} if keys else {}
    client = LoadClient(url, headers, journal, lambda *_: None, Slo(1.0, 1.0))
    rng = random.Random(name)
    while True:
        ask = question(name, rng)
        gevent.sleep(ask.think_s)
        client.send(ask, name)


def _probe(url: str, journal: TextIO) -> None:
    while True:
        start, at_s, status = time.perf_counter(), time.time(), 0
        client = HTTPClient.from_url(
            url, connection_timeout=PROBE_TIMEOUT_S, network_timeout=PROBE_TIMEOUT_S
        )
        try:
            response = client.get("/health")
            response.read()
            status = response.status_code
        except (OSError, HTTPParseError):
            pass
        finally:
            client.close()
        journal.write(probe_line(at_s, time.perf_counter() - start, status))
        gevent.sleep(PROBE_EVERY_S)


if __name__ == "__main__":
    main()
