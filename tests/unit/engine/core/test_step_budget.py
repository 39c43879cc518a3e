"""The time that streams wait for others, with all guests of a step at once. Time is simulated."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from serve_app.base.formats import Row
from serve_app.base.values.media import MEDIUM, Picture
from serve_app.engine import GenerationRequest, SamplingParams, Texts, TokenDelta
from serve_app.engine.backends.base import EmbeddingShape
from serve_app.engine.core.command_queue import CommandQueue
from serve_app.engine.core.engine_core import EngineCore
from serve_app.engine.core.sequence import Sequence as EngineSequence
from serve_app.engine.core.step_budget import StepBudget
from serve_app.engine.costs.cost_model import Profile
from serve_app.engine.engine import make_guests
from serve_app.engine.guests.embedding import EmbeddingQueue
from serve_app.engine.guests.pictures import PlacedTile, expand_media
from serve_app.engine.health import Progress
from serve_app.engine.policy.policy import SlotPolicy
from serve_app.kernels.llama.vision.positions import Pause
from tests.doubles.backend import FakeBackend
from tests.doubles.draft import FakeDraft
from tests.unit.engine.behaviour.test_pictures import N_SEEN, ScriptedProjector
from tests.unit.engine.harness import are_accepted, endless, options

BOUND_S = 0.25
# A batch takes 50 ms, and a millisecond for each row. So drafts pay, whose passes are cheap.
DECODE_S = {n: 0.050 + 0.001 * n for n in (1, 2, 4, 8, 16, 64)}
PREFILL_S = {n: 0.050 + 0.001 * n for n in (8, 16, 32, 64, 128, 256)}
VERIFY_S = {n: 0.050 + 0.001 * n for n in (2, 4, 8, 16)}
PASS_S = 0.006
DEPTH = 512
NODE_S = 0.01


class Clock:
    """A clock that only the scripted parts move."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class TimedBackend(FakeBackend):
    """Takes the time of its profile. Each row attends to each token before it for `attend_s`."""

    def __init__(self, clock: Clock, attend_s: float = 0.0) -> None:
        super().__init__(endless, n_slots=4)
        self.clock, self.attend_s = clock, attend_s
        among_s = {n: s + attend_s * n * (n - 1) / 2 for n, s in PREFILL_S.items()}
        deep_decode = {n: s + attend_s * n * DEPTH for n, s in DECODE_S.items()}
        deep_prefill = {n: s + attend_s * n * DEPTH for n, s in among_s.items()}
        self.profile = Profile(DECODE_S, among_s, VERIFY_S, DEPTH, deep_decode, deep_prefill)
        self.embedding = EmbeddingShape(64, 8, n_text=64, pooling="mean", causal=True)

    def decode(self, rows: Sequence[Row]) -> None:
        super().decode(rows)
        attended = sum(position for _, position, *_ in rows)
        self.clock.now += 0.050 + 0.001 * len(rows) + self.attend_s * attended

    def embed(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        self.clock.now += 0.050 + 0.001 * len(rows)
        return super().embed(rows)


class TimedDraft(FakeDraft):
    """Every pass takes as long."""

    def __init__(self, clock: Clock) -> None:
        passes = dict.fromkeys((1, 2, 8, 64, 256), PASS_S)
        super().__init__(endless, n_slots=4, n_ctx=2048, profile=Profile(passes, passes, passes))
        self.clock = clock

    def decode(self, rows: Sequence[Row], places: Sequence[int]) -> None:
        super().decode(rows, places)
        self.clock.now += PASS_S


class TimedProjector(ScriptedProjector):
    """A picture has a hundred nodes, between which it pauses."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def encode(
        self, prepared: bytes, tile: int, pause: Pause | None = None
    ) -> NDArray[np.float32] | None:
        assert pause is not None
        for _ in range(100):
            self.clock.now += NODE_S
            if not pause():
                return None
        self.encoded.append(prepared)
        return np.zeros((N_SEEN, 4), np.float32)


class Stream:
    """The gaps between a sequence's tokens."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.times: list[float] = []

    def __call__(self, delta: TokenDelta) -> None:
        if delta.token_ids:
            self.times.append(self.clock.now)

    @property
    def longest_s(self) -> float:
        return max(
            after - before for before, after in zip(self.times, self.times[1:], strict=False)
        )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    monkeypatch.setattr(time, "perf_counter", made)
    return made


@pytest.mark.parametrize("guests", ["none", "depth", "drafts", "pictures", "texts", "all"])
def test_drafts_prompts_texts_and_a_picture_together_keep_within_the_bound(
    clock: Clock, guests: str
) -> None:
    attend_s = 2e-5 if guests == "depth" else 0.0  # eight rows behind 1,500 tokens: 0.3 s
    backend, projector = TimedBackend(clock, attend_s), TimedProjector(clock)
    if guests in ("drafts", "all"):
        backend.draft = TimedDraft(clock)
    if guests in ("pictures", "all"):
        backend.projector = projector
    sizes = options(4, n_ctx_slot=2048, n_batch=512, max_stall_ms=1000 * BOUND_S)
    queue = CommandQueue(SlotPolicy(sizes))
    core = EngineCore(backend, sizes, queue, Progress(), make_guests)
    core.budget._clock = clock
    streams = [Stream(clock) for _ in range(2)]

    def submit(request: GenerationRequest, stream: Stream) -> None:
        spans: tuple[PlacedTile, ...] = ()
        if request.media:
            media = iter(request.media)
            prompt, spans = expand_media(request.prompt, media, projector, sizes.n_batch)
            request = replace(request, prompt=prompt)
        forecast = core.published.view.forecast
        assert are_accepted(queue.submit([EngineSequence(request, stream, None, spans)], forecast))

    for i, stream in enumerate(streams):
        submit(GenerationRequest(f"s{i}", (1, 2, 3, i), SamplingParams(max_tokens=900)), stream)
    for _ in range(10):
        core.take_commands()
        core.step()
    long = Stream(clock)
    submit(GenerationRequest("long", tuple(range(3, 1503)), SamplingParams(max_tokens=4)), long)
    if guests in ("pictures", "all"):
        seen = GenerationRequest(
            "p", (5, MEDIUM, 6), SamplingParams(max_tokens=2), media=(Picture.of(b"abc", 1, 1),)
        )
        submit(seen, Stream(clock))
    if guests in ("texts", "all"):
        texts = [Texts([tuple(range(1, 60))] * 8, "other")]
        core.guest(EmbeddingQueue).submit(texts, queue.run_between_steps)
    for _ in range(400 if guests == "depth" else 150):
        core.take_commands()
        core.step()
    assert len(long.times) == 4, "the prompt was computed"
    assert all(stream.longest_s <= BOUND_S for stream in streams)
    if guests in ("pictures", "all"):
        assert projector.encoded == [b"abc"]
    if guests in ("drafts", "all"):
        assert core.counts.proposed_tokens > 0
        assert core.counts.draft_s > 0
    core.close(healthy=True)


def test_a_budget_is_what_the_clock_and_the_forecasts_leave() -> None:
    now = 5.0
    budget = StepBudget(250, lambda: now)
    assert budget.left_s == 0.25
    now += 0.1
    budget.expect(0.05)
    assert budget.left_s == pytest.approx(0.1)
    assert budget.fits(0.09)
    assert not budget.fits(0.11)
    assert budget.allows(0.25)
    assert not budget.allows(0.26)
    budget.begin()
    assert budget.left_s == 0.25


def test_without_a_bound_all_fits() -> None:
    budget = StepBudget(math.inf, lambda: 0.0)
    assert budget.fits(1e9)
    assert budget.allows(1e9)


@pytest.mark.parametrize(
    ("decode_s", "n_turns", "expected"),
    [
        pytest.param(0.02, 1, 0.23, id="the bound, less a margin"),
        pytest.param(0.02, 2, 0.115, id="turns share it"),
        pytest.param(0.15, 1, 0.3, id="as long as decoding takes"),
        pytest.param(0.40, 1, 0.63, id="but prompts never more than the bound"),
    ],
)
def test_prompts_get_what_decoding_leaves(decode_s: float, n_turns: int, expected: float) -> None:
    budget = StepBudget(250, lambda: 0.0)
    assert budget.prompts_s(decode_s, n_turns) == pytest.approx(expected)
    assert budget.planned_s(decode_s, n_turns) == pytest.approx(expected)
