"""Pictures beside other requests, with a scripted projector."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from serve_app.base.errors import DecodeError, InvalidRequestError, PromptTooLongError
from serve_app.base.values.answers import FinishReason
from serve_app.base.values.media import MEDIUM, Medium, Picture, Size
from serve_app.engine import Engine, GenerationRequest, SamplingParams
from serve_app.kernels.llama.vision.positions import Part, Pause, Positions, Tile
from tests.unit.engine.harness import (
    PATIENCE_S,
    Inbox,
    SteppedBackend,
    WatchedBackend,
    ask,
    assert_only_own_tokens_were_fed,
    options,
    request,
    running,
    start,
    until,
)

N_SEEN = 8
BEGIN, END = (ord("<"),), (ord(">"),)
GOOD, OTHER, BAD = (Picture.of(pixels, 1, 1) for pixels in (b"abc", b"xyz", b"bad"))


class ScriptedProjector:
    """Pictures are eight tokens between two others. Encoding looks around until the test lets it end;
    BAD fails then."""

    fingerprint = b"scripted"
    sees, hears = True, False

    def __init__(self, *, causal: bool = True) -> None:
        self.causal = causal
        self.encoded: list[bytes] = []
        self.n_left = 0
        self.is_encoding = threading.Event()
        self.may_end = threading.Event()

    def layout(self, size: Size) -> tuple[Part, ...]:
        return BEGIN, Tile(N_SEEN, 4, self.causal), END

    def prepare(self, medium: Medium) -> bytes:
        assert isinstance(medium, Picture)
        return medium.pixels

    def encode(
        self, prepared: bytes, tile: int, pause: Pause | None = None
    ) -> NDArray[np.float32] | None:
        assert pause is not None
        self.is_encoding.set()
        deadline = time.monotonic() + PATIENCE_S
        while not self.may_end.wait(0.001):
            assert time.monotonic() < deadline
            if not pause():
                self.n_left += 1
                return None
        self.encoded.append(prepared)
        if prepared == BAD.pixels:
            raise DecodeError("scripted failure")
        return np.zeros((N_SEEN, 4), np.float32)


def seeing(
    n_slots: int = 2, *, causal: bool = True, several: bool = False
) -> tuple[SteppedBackend, ScriptedProjector]:
    """A backend, and its projector."""
    backend, projector = SteppedBackend(n_slots=n_slots), ScriptedProjector(causal=causal)
    backend.projector, backend.positions = projector, Positions(several=several)
    return backend, projector


def asked(name: str, *pictures: Picture, after: str = "what?\n") -> GenerationRequest:
    """A question about pictures."""
    prompt = (*b"in ", *(MEDIUM,) * len(pictures), *after.encode())
    return GenerationRequest(name, prompt, SamplingParams(max_tokens=4), media=pictures)


def test_streams_go_on_while_a_picture_is_encoded() -> None:
    backend, projector = seeing()
    backend.resume()
    with running(backend, options(max_stall_ms=20)) as engine:
        (stream,) = start(engine, request("s", max_tokens=None))
        until(lambda: len(stream.token_ids) > 2)
        (pictured,) = start(engine, asked("p", GOOD))
        assert projector.is_encoding.wait(PATIENCE_S)
        stream.wait()
        (other,) = start(engine, request("o", "other\n"))
        other.wait()
        assert not pictured.deltas
        projector.may_end.set()
        assert pictured.wait().reason is FinishReason.LENGTH
    assert_only_own_tokens_were_fed(backend)
    assert projector.encoded == [GOOD.pixels]


@pytest.mark.parametrize(("causal", "several"), [(True, False), (False, False), (True, True)])
def test_a_pictures_rows_are_a_batch_of_their_own(causal: bool, several: bool) -> None:
    backend, projector = seeing(causal=causal, several=several)
    backend.resume()
    backend.resume()
    projector.may_end.set()
    with running(backend) as engine:
        inboxes = start(engine, asked("a", GOOD), asked("b", OTHER), request("c"))
        ends = [inbox.wait() for inbox in inboxes]
        assert engine.stats().pictures.encoded_tiles == 2
        assert engine.media_tokens([(8, 8), (9, 9)]) == 2 * (1 + N_SEEN + 1)
    assert_only_own_tokens_were_fed(backend)
    assert ends[0].usage.prompt_tokens == len("in ") + 1 + N_SEEN + 1 + len("what?\n")
    seen = [batch for batch in backend.batches if any(token < 0 for token, *_ in batch)]
    assert all(token < 0 for batch in seen for token, *_ in batch)
    assert sum(map(len, seen)) == 2 * N_SEEN
    if not causal:
        assert [len(batch) for batch in seen] == [N_SEEN, N_SEEN]


def test_one_that_cannot_be_encoded_ends_those_who_need_it_only() -> None:
    backend, projector = seeing(3)
    backend.resume()
    with running(backend) as engine:
        inboxes = start(engine, asked("a", BAD), asked("b", BAD), asked("c", GOOD))
        assert projector.is_encoding.wait(PATIENCE_S)
        projector.may_end.set()
        ends = [inbox.wait() for inbox in inboxes]
        again = ask(engine, asked("d", GOOD))
    assert [end.reason for end in ends] == [FinishReason.ERROR] * 2 + [FinishReason.LENGTH]
    assert [type(end.error) for end in ends[:2]] == [DecodeError] * 2
    assert again.end.reason is FinishReason.LENGTH
    assert_only_own_tokens_were_fed(backend)


def test_nothing_is_encoded_for_those_who_have_left() -> None:
    backend, projector = seeing()
    backend.resume()
    with running(backend) as engine:
        first, second = start(engine, asked("a", GOOD), asked("b", GOOD))
        assert projector.is_encoding.wait(PATIENCE_S)
        engine.abort("a")
        first.wait()
        assert projector.n_left == 0
        engine.abort("b")
        second.wait()
        until(lambda: projector.n_left == 1)
        assert ask(engine, request("c")).end.reason is FinishReason.LENGTH


@pytest.mark.parametrize("several", [False, True])
def test_who_leaves_within_a_tile_leaves_what_is_before_it(several: bool) -> None:
    backend, projector = seeing(1, several=several)
    projector.may_end.set()
    with running(backend, options(n_slots=1, n_batch=N_SEEN // 2)) as engine:
        (left,) = start(engine, asked("a", GOOD))
        backend.wait_for_batch()
        while not any(token < 0 for token in backend.slots[0]):
            backend.step()
        assert len(backend.slots[0]) == len("in <") + N_SEEN // 2
        engine.abort("a")
        backend.resume()
        left.wait()
        again, other = ask(engine, asked("b", GOOD)), ask(engine, asked("c", OTHER))
    assert again.end.usage.cached_tokens == other.end.usage.cached_tokens == len("in <")
    assert_only_own_tokens_were_fed(backend)


@pytest.mark.parametrize("several", [False, True])
def test_who_comes_while_a_picture_is_computed_starts_from_all_of_it(several: bool) -> None:
    backend, projector = seeing(3, several=several)
    projector.may_end.set()
    with running(backend, options(n_slots=3, n_batch=N_SEEN // 2)) as engine:
        (first,) = start(engine, asked("a", GOOD))
        backend.wait_for_batch()
        while not any(token < 0 for token in backend.slots[0]):
            backend.step()
        others = start(engine, asked("b", GOOD, after="why?\n"), asked("c", OTHER))
        backend.resume()
        for inbox in (first, *others):
            assert inbox.wait().reason is FinishReason.LENGTH
    assert_only_own_tokens_were_fed(backend)


@pytest.mark.parametrize(
    ("one", "error", "told"),
    [
        (replace(asked("a", GOOD), media=()), InvalidRequestError, "outside 0 to"),
        (replace(asked("a", GOOD), media=(GOOD, GOOD)), InvalidRequestError, "places"),
        (asked("a", GOOD, after=""), None, ""),
        (asked("a", *[GOOD] * 7), PromptTooLongError, "tokens"),
        (replace(asked("a", GOOD), context_shift=True), InvalidRequestError, "shifted"),
    ],
)
def test_what_cannot_be_computed_is_refused(
    one: GenerationRequest, error: type[Exception] | None, told: str
) -> None:
    backend, projector = seeing()
    backend.resume()
    projector.may_end.set()

    def submitted(engine: Engine) -> Inbox:
        (inbox,) = start(engine, one)
        inbox.wait()
        return inbox

    with running(backend) as engine:
        if error is None:
            assert submitted(engine).end.reason is FinishReason.LENGTH
        else:
            with pytest.raises(error, match=told):
                submitted(engine)


def test_a_model_without_a_projector_refuses_pictures() -> None:
    with (
        running(WatchedBackend(n_slots=1)) as engine,
        pytest.raises(InvalidRequestError, match="projector"),
    ):
        start(engine, asked("a", GOOD))
