"""The engine: many requests batched over one llama.cpp context. No Ray, no HTTP."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from serve_app.base import progress
from serve_app.base.engine_options import EngineOptions
from serve_app.base.errors import (
    CorralError,
    EngineFailedError,
    InvalidRequestError,
    PromptTooLongError,
    TextTooLongError,
)
from serve_app.base.progress import Report
from serve_app.base.sampling import SamplingParams
from serve_app.base.values.answers import Accepted, TokenDelta
from serve_app.base.values.media import MEDIUM, Medium, Picture, Size, Sound
from serve_app.base.values.requests import GenerationRequest
from serve_app.engine.adapters import EngineAdapters
from serve_app.engine.backends.base import Backend, Projector
from serve_app.engine.backends.opening import open_backend
from serve_app.engine.cache.files import SlotFiles
from serve_app.engine.cache.manager import PrefixStorage
from serve_app.engine.cache.transfers import PrefixTransfer
from serve_app.engine.core.engine_core import EngineCore
from serve_app.engine.core.guest import Guest
from serve_app.engine.core.loop import DecoderLoop
from serve_app.engine.core.sequence import Sequence as EngineSequence
from serve_app.engine.core.sequence import n_keep_on_shift
from serve_app.engine.guests.cache_mode_switcher import CacheModeSwitcher
from serve_app.engine.guests.drafts.drafter import Drafter
from serve_app.engine.guests.drafts.drafting import Drafting
from serve_app.engine.guests.embedding import EmbeddingQueue, Texts, Vectors
from serve_app.engine.guests.pictures import Encoding, PlacedTile, expand_media
from serve_app.engine.health import HangWatch
from serve_app.engine.stream import TokenStream
from serve_app.kernels.llama.grammars.constraint import Constraint
from serve_app.kernels.llama.vision.positions import Tile

logger = logging.getLogger("corral.engine")


def make_guests(core: EngineCore) -> list[Guest]:
    """Make the guests that an engine's backend and options ask for. Decoder thread."""
    backend, options, costs, steps = core.backend, core.options, core.costs, core.steps
    texts = EmbeddingQueue(backend, costs, core.progress, core.policy, steps)
    guests: list[Guest] = [
        CacheModeSwitcher(options, backend, core.cache, core.scheduler, steps),
        texts,
        PrefixStorage(core.cache, steps),
    ]
    if backend.traits.n_rewind and (options.speculate or backend.draft is not None):
        model = backend.draft
        drafter = None if model is None else Drafter(model, options.n_slots, core.progress)
        drafting = Drafting(
            costs,
            steps,
            lookup=options.speculate,
            drafter=drafter,
            n_rewind=backend.traits.n_rewind,
        )
        core.scheduler.drafts = drafting
        guests.append(drafting)
    if backend.pictures is not None:
        projector = backend.pictures.projector
        guests.append(Encoding(projector, options.picture_ram_bytes, texts, steps))
    return guests


class Engine(DecoderLoop):
    """A batched engine with one decoder thread. Any thread may call.

    `submit` and `submit_many` need a running asyncio event loop, in which the streams are then read;
    `submit_to` does not. Every request that is accepted gets exactly one terminal event.

        engine = Engine.load("model.gguf", EngineOptions(n_slots=8, n_ctx_slot=2048, threads=4))
        async for delta in engine.submit(GenerationRequest("id", engine.tokenize("Hello"))):
            print(delta.text, end="")
    """

    def __init__(self, open_backend: Callable[[], Backend], options: EngineOptions) -> None:
        """Opens the backend on the decoder thread and waits for it; raises what that raises."""
        super().__init__(open_backend, options, make_guests)
        self.options = options
        self._backend = backend = self.core.backend
        self._vocabulary = backend.vocabulary
        self._embeddings = self.core.guest(EmbeddingQueue)
        self._hang_watch = HangWatch()
        self.adapters = EngineAdapters(self.core, self.run_between_steps)
        self.slot_files = SlotFiles(options, backend.states.key, self.run)
        self.prefixes = PrefixTransfer(options, backend.states.key, self.run)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], options: EngineOptions, report: Report = progress.nowhere
    ) -> Engine:
        """An engine for a GGUF file; `report` is told of its start. Raises ConfigError."""
        return cls(lambda: open_backend(path, options, report), options)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """A prompt's token ids, with BOS if the model wants it; control tokens are recognised."""
        return tuple(self._vocabulary.tokenize(text, add_special=True, parse_special=True))

    @property
    def vocabulary_key(self) -> bytes:
        """A key that tells this vocabulary from others."""
        return self._vocabulary.vocabulary_key

    def prepare(self, request: GenerationRequest) -> object:
        """Compile a request's grammar, and make the samplers that look at its prompt. `submit` does that
        else, and it may take a second. They are kept as long as the result. Raises InvalidRequestError for
        what cannot be used."""
        return self._constraint(request.sampling), self._history(request)

    def _constraint(self, sampling: SamplingParams) -> Constraint | None:
        if sampling.grammar is None:
            return None
        return self._vocabulary.constraint(sampling.grammar, sampling.triggers)

    def _history(self, request: GenerationRequest) -> object:
        return self._vocabulary.history(
            request.sampling, self.options.n_ctx_slot, request.all_tokens
        )

    def submit(self, request: GenerationRequest) -> TokenStream:
        """Start a request. Raises InvalidRequestError, PromptTooLongError, QueueFullError,
        EngineClosedError or EngineFailedError; nothing was computed then."""
        (outcome,) = self.submit_many([request])
        if isinstance(outcome, CorralError):
            raise outcome
        return outcome

    def submit_many(self, requests: Sequence[GenerationRequest]) -> list[TokenStream | CorralError]:
        """Start several requests so that one step sees them all; each is accepted or refused for itself."""
        streams = [TokenStream(partial(self.abort, request.id)) for request in requests]
        outcomes = self.submit_to(list(zip(requests, (s.push for s in streams), strict=True)))
        return [
            outcome if isinstance(outcome, CorralError) else stream
            for outcome, stream in zip(outcomes, streams, strict=True)
        ]

    def on_delivered(self, callback: Callable[[], None]) -> None:
        """Have this called on the decoder thread whenever a step's deltas have been handed to their sinks.
        It must not block or raise."""
        self.core.delivered = callback

    def embed(
        self, texts: Sequence[tuple[int, ...]], client: str = "", *, background: bool = False
    ) -> Future[Vectors]:
        """Vectors of a client's texts, given as tokens: float32, one row each, not normalised; of a
        model with a classifier, its outputs. Cancelling the future spares what was not yet computed. Raises
        like `submit`, TextTooLongError instead of PromptTooLongError."""
        (outcome,) = self.embed_many([Texts(texts, client, background=background)])
        if isinstance(outcome, CorralError):
            raise outcome
        return outcome

    def embed_many(self, requests: Sequence[Texts]) -> list[Future[Vectors] | CorralError]:
        """Embed several requests' texts, so that one batch computes what fits of them all; each request is
        accepted or refused for itself."""
        refused = [self._reason_to_refuse_texts(request) for request in requests]
        pairs = list(zip(requests, refused, strict=True))
        checked = [request for request, refusal in pairs if refusal is None]
        entered = iter(self._embeddings.submit(checked, self.run_between_steps))
        return [refusal or next(entered) or one.future for one, refusal in pairs]

    def media_tokens(self, sizes: Sequence[Size]) -> int:
        """How many tokens media of these sizes have in a prompt. A sound takes some tenths of a second for
        each half minute, the first time. Raises InvalidRequestError."""
        pictures = self._backend.pictures
        if pictures is None:
            raise InvalidRequestError("This model reads text only: it has no projector.", "model")
        projector = pictures.projector
        parts = [part for size in sizes for part in projector.layout(size)]
        return sum(part.n_tokens if isinstance(part, Tile) else len(part) for part in parts)

    def latencies(self) -> dict[str, dict[float, int]]:
        """Histograms of `ttft_s` and of gaps between tokens (`itl_s`): see `Latencies.recent`."""
        return self.core.latencies.recent()

    def check_health(self, now: float | None = None) -> None:
        """Raises EngineFailedError if the decoder thread is dead or hangs in a batch. To be called by one
        thread only, every few seconds; `now` is on `time.monotonic`."""
        if self.failure is not None:
            raise EngineFailedError(*self.failure.args)
        batch, now = self.progress.batch, time.monotonic() if now is None else now
        if self._hang_watch.hangs(batch, now) and batch is not None:
            raise EngineFailedError(
                f"The engine hangs: a batch with a forecast of {batch.forecast_s():.2f} s has been running "
                f"for {now - batch.began:.0f} s."
            )

    def submit_to(
        self, entries: Sequence[tuple[GenerationRequest, Callable[[TokenDelta], None]]]
    ) -> list[CorralError | Accepted]:
        """Start several requests, each with a sink, which the decoder thread calls with its deltas: it must
        not block or raise. Returns the acceptance of each, or why it is refused: then nothing calls its
        sink."""
        made = [self._sequence_or_refusal(*entry) for entry in entries]
        sequences = [one for one in made if isinstance(one, EngineSequence)]
        admitted = iter(self.enqueue(sequences))
        return [next(admitted) if isinstance(one, EngineSequence) else one for one in made]

    def _sequence_or_refusal(
        self, request: GenerationRequest, sink: Callable[[TokenDelta], None]
    ) -> EngineSequence | CorralError:
        try:
            request, tiles = self._expand_media(request)
            self._check(request, is_expanded=bool(tiles))
            sequence = EngineSequence(request, sink, self._constraint(request.sampling), tiles)
            sequence.history = self._history(request)
            sequence.resume(self._vocabulary, self.options)
            return sequence
        except InvalidRequestError as error:
            return error
        except Exception as error:  # whatever it is, those that came together with this one go on
            logger.exception("Request %s cannot be begun.", request.id)
            return CorralError(f"The request cannot be begun ({type(error).__name__}).")

    def _expand_media(
        self, request: GenerationRequest
    ) -> tuple[GenerationRequest, tuple[PlacedTile, ...]]:
        """The request with its media's own tokens. Raises InvalidRequestError."""
        if not request.media:
            return request, ()
        projector = self._projector_for(request.media, [request.prompt])
        if request.sampling.prompt_logprobs:
            raise InvalidRequestError(
                "Prompts with media cannot have log-probabilities.", "logprobs"
            )
        if request.context_shift:
            raise InvalidRequestError(
                "A prompt with media cannot be shifted: half of one is none.", "context_shift"
            )
        prompt, tiles = expand_media(
            request.prompt, iter(request.media), projector, self.options.n_batch
        )
        return replace(request, prompt=prompt), tiles

    def _projector_for(
        self, media: Sequence[Medium], prompts: Sequence[tuple[int, ...]]
    ) -> Projector:
        """The projector for the media of these prompts. Raises InvalidRequestError if there is none."""
        pictures = self._backend.pictures
        if pictures is None:
            raise InvalidRequestError("This model reads text only: it has no projector.", "model")
        projector = pictures.projector
        for kind, able in ((Picture, projector.sees), (Sound, projector.hears)):
            if not able and any(isinstance(one, kind) for one in media):
                raise InvalidRequestError(f"This model takes no {kind.__name__.lower()}s.", "model")
        if sum(prompt.count(MEDIUM) for prompt in prompts) != len(media):
            raise InvalidRequestError(
                "The prompt has another number of places than of media.", "prompt"
            )
        return projector

    def _see(self, request: Texts) -> None:
        """Put the media's own tokens into texts. Raises InvalidRequestError."""
        shape, media = self._backend.embeddings.shape, iter(request.media)
        if shape.pooling == "rank" or not shape.causal:  # an encoder computes a text in one pass
            raise InvalidRequestError("This kind of model takes texts only.", "input")
        projector = self._projector_for(request.media, request.tokens)
        placed = [expand_media(text, media, projector, shape.n_rows) for text in request.tokens]
        request.tokens = [tokens for tokens, _ in placed]
        request.tiles = [tiles for _, tiles in placed]

    def _reason_to_refuse_texts(self, request: Texts) -> CorralError | None:
        n_vocab, n_text = self._vocabulary.n_vocab, self._backend.embeddings.shape.n_text
        try:
            if request.media:
                self._see(request)
        except InvalidRequestError as error:
            return error
        texts, least = request.tokens, -math.inf if request.media else 0
        if not texts or not all(texts):
            return InvalidRequestError("A text is empty.", "input")
        longest = max(map(len, texts))
        if longest > n_text:
            return TextTooLongError(longest, n_text, "input")
        if not all(least <= token < n_vocab for text in texts for token in text):
            return InvalidRequestError(
                f"A text holds a token id outside 0 to {n_vocab - 1}.", "input"
            )
        return None

    def _check(self, request: GenerationRequest, *, is_expanded: bool) -> None:
        n_vocab = self._vocabulary.n_vocab
        if not self._backend.embeddings.shape.causal:
            raise InvalidRequestError("This model is an encoder: it cannot generate text.", "model")
        if not request.prompt:
            raise InvalidRequestError("The prompt is empty.", "prompt")
        n_ctx_slot, shifts = self.options.n_ctx_slot, n_keep_on_shift(request, self.options)
        n_given = len(request.prompt if shifts else request.all_tokens)
        if n_given >= n_ctx_slot:
            raise PromptTooLongError(n_given, n_ctx_slot, "prompt")
        if not all(token < n_vocab and (token >= 0 or is_expanded) for token in request.all_tokens):
            raise InvalidRequestError(
                f"The prompt holds a token id outside 0 to {n_vocab - 1}.", "prompt"
            )
        biased = request.sampling.logit_bias.tokens
        if biased.size and not (biased.min() >= 0 and biased.max() < n_vocab):
            raise InvalidRequestError(
                f"logit_bias names a token id outside 0 to {n_vocab - 1}.", "logit_bias"
            )
        if request.sampling.max_tokens is not None and request.sampling.max_tokens < 0:
            raise InvalidRequestError("max_tokens must not be negative.", "max_tokens")
        if not all(request.sampling.stop):
            raise InvalidRequestError("A stop string is empty.", "stop")
        self.adapters.check(request.adapters)
