"""A batch's lines, and people, in an engine of this process. No Ray, no HTTP."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Sequence

from loadtests.batch.figures import Window
from loadtests.batch.people import People, Shape, for_a_while
from serve_app.cli.measure import process
from serve_app.cli.measure.benchmark import BenchmarkError, Prompt, Prompts
from serve_app.engine import CorralError, Engine, GenerationRequest, SamplingParams
from serve_app.engine.policy.policy import BACKGROUND_PLACES

_LOOK_S = 0.05
_IDLE_S = 30.0


def measure(
    shape: Shape,
    vocabulary: Sequence[int],
    seed: int,
    window_s: float,
    *,
    people: bool,
    lines: bool,
) -> Window:
    """Measure this process's engine for so many seconds: with people, with lines of a batch, or both. With
    the same seed, people think for as long, and lines are as long; no two windows have the same prompts."""
    run = _Run(shape, vocabulary, seed)
    return asyncio.run(run.measure(window_s, people=people, lines=lines))


class _Run:
    def __init__(self, shape: Shape, vocabulary: Sequence[int], seed: int) -> None:
        self._shape, self._seed = shape, seed
        self._prompts = Prompts(vocabulary, random.randrange(2**63))
        self._people = People(self._ask, shape, vocabulary, seed)
        self._names = itertools.count()
        self._n_begun = 0
        self._n_tokens = 0
        """Of lines."""
        self._engine: Engine = process.opened_object()

    async def measure(self, window_s: float, *, people: bool, lines: bool) -> Window:
        tasks = []
        if lines:
            n_lines = BACKGROUND_PLACES * self._shape.n_slots
            tasks = [asyncio.create_task(self._lines(i)) for i in range(n_lines)]
            await self._until_in_full_swing(tasks)
        before = self._n_tokens
        began = time.perf_counter()
        if people:
            tasks += self._people.sit_down()
        await for_a_while(tasks, window_s)
        window = Window(time.perf_counter() - began, self._people.turns, self._n_tokens - before)
        await self._until_idle()
        return window

    async def _until_idle(self) -> None:
        """What was cancelled has left the engine, which has places for the next window then. Raises
        BenchmarkError."""
        deadline = time.perf_counter() + _IDLE_S
        while (
            found := self._engine.stats()
        ).queue.background_running or found.queue.background_waiting:
            if time.perf_counter() > deadline:
                raise BenchmarkError("Cancelled lines still run.")
            await asyncio.sleep(_LOOK_S)

    async def _until_in_full_swing(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """The lines have got out of step, as those of a long batch are."""
        while self._n_begun < 2 * self._shape.n_slots:
            await asyncio.wait(tasks, timeout=_LOOK_S, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()

    async def _lines(self, number: int) -> None:
        """One line after the other; the first one is shorter, so that they end at different times."""
        shape, rng = self._shape, random.Random(f"{self._seed} {number}")
        n_answer = rng.randint(1, shape.line_answer)
        while True:
            prompt, is_first = self._prompts.draw(shape.line_prompt), True
            async for n_tokens in self._ask("batch", prompt, n_answer, background=True):
                self._n_begun += is_first and n_tokens > 0
                is_first = is_first and not n_tokens
                self._n_tokens += n_tokens
            n_answer = shape.line_answer

    async def _ask(
        self, user: str, prompt: Prompt, n_answer: int, *, background: bool = False
    ) -> AsyncIterator[int]:
        sampling = SamplingParams(max_tokens=n_answer, ignore_eos=True)
        name = f"{user}-{next(self._names)}"
        outcome = self._engine.submit(
            GenerationRequest(
                name, prompt, sampling, user, background=background, told_together=background
            )
        )
        if isinstance(outcome, CorralError):
            raise outcome
        async with outcome as stream:
            async for delta in stream:
                yield len(delta.token_ids)
