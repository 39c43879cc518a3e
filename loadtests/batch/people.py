"""Questions, and people who chat: the same ones for an engine and for a server."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from loadtests.batch.figures import Turn
from serve_app.cli.measure.benchmark import Prompt, Prompts

Ask = Callable[[str, Prompt, int], AsyncIterator[int]]
"""Of a user's name, a prompt, and a number of tokens to answer: how many tokens have come, whenever
some do."""
_SPREAD = 0.5
"""Of the pauses' logarithms."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes are in tokens."""

    n_slots: int
    users: int = 2
    user_prompt: int = 96
    """A question; the conversation before it comes on top."""
    user_answer: int = 48
    user_turns: int = 4
    """Of one conversation; then another one begins."""
    think_s: float = 4.0
    """Median of the pauses between an answer and the next question."""
    line_prompt: int = 128
    line_answer: int = 64

    @property
    def n_ctx_slot(self) -> int:
        """The tokens that a slot must hold."""
        talk = self.user_turns * (self.user_prompt + self.user_answer)
        return max(talk, self.line_prompt + self.line_answer) + 8


class People:
    """Users who ask, read, think and ask again, until they are cancelled. An event loop's."""

    def __init__(self, ask: Ask, shape: Shape, vocabulary: Sequence[int], seed: int) -> None:
        """The same seed makes users who think for as long. Their prompts are always new, as a cache may
        have what another window asked."""
        self._ask, self._shape, self._vocabulary, self._seed = ask, shape, vocabulary, seed
        self._turns: list[Turn] = []
        self._began = 0.0

    def sit_down(self) -> list[asyncio.Task[None]]:
        """They begin now."""
        self._began = time.perf_counter()
        return [asyncio.create_task(self._chat(n)) for n in range(self._shape.users)]

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Their questions so far, in seconds since they sat down; those without an answer when they were
        cancelled, too."""
        return tuple(self._turns)

    async def _chat(self, user: int) -> None:
        """One conversation after the other."""
        shape, rng = self._shape, random.Random(f"{self._seed} user {user}")
        prompts = Prompts(self._vocabulary, random.randrange(2**63))
        said: Prompt = ()
        for turn in itertools.count():
            await asyncio.sleep(rng.lognormvariate(0.0, _SPREAD) * shape.think_s)
            said = () if turn % shape.user_turns == 0 else said
            said += prompts.draw(shape.user_prompt)
            asked, times = time.perf_counter(), list[float]()
            try:
                async for n_tokens in self._ask(f"user-{user}", said, shape.user_answer):
                    times += [time.perf_counter()] * n_tokens
            finally:
                tokens_s = tuple(at - self._began for at in times)
                ended_s = time.perf_counter() - self._began
                self._turns.append(Turn(asked - self._began, ended_s, tokens_s))
            said += prompts.draw(shape.user_answer)  # stands for what it was answered


async def for_a_while(tasks: Sequence[asyncio.Task[None]], seconds: float) -> None:
    """Let these run for so long, and cancel them. Raises what one of them does."""
    if tasks:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    else:
        await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    for found in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(found, Exception):
            raise found
