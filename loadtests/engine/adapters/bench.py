"""One engine with adapters, and streams that come to it in several ways."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from loadtests.common.benchmark import Prompt, Prompts
from loadtests.common.rounds import in_turns
from loadtests.engine import process
from loadtests.engine.bare_loop import text_tokens
from serve_app.engine import EngineOptions, GenerationRequest, SamplingParams, TokenStream
from serve_app.engine.options import AdapterFile
from serve_app.errors import CorralError
from serve_app.types import Adapters, AdapterUse
from tools.random_models.adapter import write_random_adapter

ADAPTERS, APART, BASE, PARTS = "adapters", "apart", "base", "base, parts"
WAYS = ADAPTERS, APART, BASE, PARTS
_TIMEOUT_S = 600
SWITCH = {"auto": None, "on": True, "off": False}

Asked = tuple[Prompt, Adapters]
Text = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """The streams that came together."""

    seconds: float
    texts: tuple[Text, ...]
    """As tokens."""
    gaps_s: tuple[float, ...]
    """Between two tokens of a stream."""

    @property
    def tokens_per_s(self) -> float:
        """Of all together, their prompts' time included."""
        return sum(map(len, self.texts)) / self.seconds


def joined(runs: Sequence[Run]) -> Run:
    """One after the other."""
    return Run(
        sum(one.seconds for one in runs),
        tuple(text for one in runs for text in one.texts),
        tuple(gap for one in runs for gap in one.gaps_s),
    )


def _run(asked: Sequence[Asked], n_tokens: int) -> Run:
    """In the engine's process: all at once."""
    return asyncio.run(asyncio.wait_for(_together(asked, n_tokens), _TIMEOUT_S))


async def _together(asked: Sequence[Asked], n_tokens: int) -> Run:
    sampling = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True)
    began = time.perf_counter()
    requests = [
        GenerationRequest(f"stream-{i}", prompt, sampling, cache_group=f"{began}", adapters=used)
        for i, (prompt, used) in enumerate(asked)
    ]
    streams = process.engine().submit_many(requests)
    found = await asyncio.gather(*(_read(one) for one in streams))
    return Run(
        time.perf_counter() - began,
        tuple(text for text, _ in found),
        tuple(b - a for _, times in found for a, b in pairwise(times)),
    )


async def _read(outcome: TokenStream | CorralError) -> tuple[Text, list[float]]:
    """A stream's tokens, and when they came."""
    if isinstance(outcome, CorralError):
        raise outcome
    tokens: list[int] = []
    times: list[float] = []
    async with outcome as stream:
        async for delta in stream:
            tokens += delta.token_ids
            times += [time.perf_counter()] * len(delta.token_ids)
            if delta.end is not None and delta.end.error is not None:
                raise delta.end.error
    return tuple(tokens), times


class Bench:
    """One engine with adapters, and the streams."""

    def __init__(self, settings: argparse.Namespace, folder: Path) -> None:
        """Writes the adapters into the folder."""
        names = [f"adapter-{i}" for i in range(settings.adapters)]
        files = [AdapterFile(name, folder / f"{name}.gguf") for name in names]
        for seed, one in enumerate(files):
            write_random_adapter(settings.model, one.path, rank=settings.rank, seed=seed)
        self._sets: list[Adapters] = [(), *((AdapterUse(name, 1.0),) for name in names)]
        self.n_each: int = settings.streams // len(self._sets)
        self._n_tokens: int = settings.max_tokens
        self._rounds: int = settings.rounds
        draw = Prompts(text_tokens(settings.model)).draw
        n_streams = self.n_each * len(self._sets)
        self._prompts = [draw(settings.prompt_tokens) for _ in range(n_streams)]
        self.options = EngineOptions(
            n_slots=n_streams,
            n_ctx_slot=settings.prompt_tokens + settings.max_tokens + 1,
            threads=settings.threads,
            kv_unified=SWITCH[settings.kv_unified],
            cache_ram_bytes=0,
            adapters=tuple(files),
            speculate=False,
        )
        self._process = process.started(settings.model, self.options)

    def _asked(self, way: str) -> list[Asked]:
        """As they come: by turns of all adapters."""
        n_sets = len(self._sets)
        if way in (BASE, PARTS):
            return [(prompt, ()) for prompt in self._prompts]
        return [(prompt, self._sets[i % n_sets]) for i, prompt in enumerate(self._prompts)]

    def _go(self, asked: Sequence[Asked]) -> Run:
        run: Run = self._process.submit(_run, asked, self._n_tokens).result(_TIMEOUT_S)
        return run

    def measure(self, number: int, way: str) -> Run:
        """One way in one round, its texts in the order of the streams."""
        asked, n_sets = self._asked(way), len(self._sets)
        if way == APART:
            runs = [self._go(asked[first::n_sets]) for first in range(n_sets)]
            texts = zip(*(one.texts for one in runs), strict=True)
            whole = joined(runs)
            found = Run(whole.seconds, tuple(one for row in texts for one in row), whole.gaps_s)
        elif way == PARTS:
            starts = range(0, len(asked), self.n_each)
            found = joined([self._go(asked[start : start + self.n_each]) for start in starts])
        else:
            found = self._go(asked)
        print(f"{way}, round {number}: {found.tokens_per_s:.1f} tokens/s", file=sys.stderr)
        return found

    def alone(self, way: str) -> tuple[Text, ...]:
        """The texts of streams that have the engine for themselves."""
        return tuple(self._go([one]).texts[0] for one in self._asked(way))

    def run(self) -> list[dict[str, Run]]:
        """All rounds."""
        return in_turns(WAYS, self._rounds, self.measure)

    def close(self) -> None:
        """End the engine."""
        self._process.shutdown()
