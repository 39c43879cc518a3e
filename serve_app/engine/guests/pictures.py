"""Pictures and sounds in prompts: the tokens in their places, and when their tiles are encoded.

A tile takes as many tokens of a prompt as it has embeddings: negative ones, which no vocabulary has. They
are a hash of what is seen. So all that compares tokens tells pictures apart by their content (slots,
tiers, files, other replicas), and knows nothing of pictures. Tiles are encoded between steps, in
pieces that running streams have time for.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b, shake_128
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from serve_app.base.errors import CorralError, DecodeError, InvalidRequestError
from serve_app.base.formats import Row
from serve_app.base.sharing import turns
from serve_app.base.values.media import MEDIUM, Medium
from serve_app.engine.backends.base import Backend, PictureSupport, Projector
from serve_app.engine.core.guest import Guest, Steps
from serve_app.engine.core.sequence import Sequence as EngineSequence
from serve_app.kernels.llama.vision.positions import Tile, cannot_be_used

if TYPE_CHECKING:
    from serve_app.engine.guests.embedding import EmbeddingQueue, PendingText

    TileReader: TypeAlias = EngineSequence | PendingText
    """A sequence with pictures, or a text that becomes a vector: what embeddings of tiles are for."""

# A tile has so many at least, or its hash would be too short to tell it from others.
_LEAST_TOKENS = 4
_NEGATIVE = np.int32(-(2**31))


@dataclass(slots=True)
class PlacedTile:
    """A tile of a picture or sound, and its place in a prompt. Decoder thread only, once there."""

    start: int
    tile: Tile
    medium: Medium
    number: int
    key: bytes
    """Tells it from all others with other embeddings."""
    embeddings: NDArray[np.float32] | None = field(default=None, repr=False)

    @property
    def end(self) -> int:
        """The index of the token behind it."""
        return self.start + self.tile.n_tokens

    @property
    def is_ready(self) -> bool:
        """Whether its embeddings are there."""
        return self.embeddings is not None

    @property
    def is_whole(self) -> bool:
        """Whether all of its rows must be computed in one batch: each sees all others."""
        return not self.tile.causal

    def decode(self, backend: Backend, rows: Sequence[Row]) -> None:
        """Compute some of its rows, as `Backend.decode` does."""
        pictures, embeddings, first = self._find_embeddings(backend, rows)
        pictures.decode(rows, embeddings, self.tile, first)

    def embed(self, backend: Backend, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Compute vectors of some of its rows, as `EmbeddingSupport.embed` does."""
        pictures, embeddings, first = self._find_embeddings(backend, rows)
        return pictures.embed(rows, embeddings, self.tile, first)

    def _find_embeddings(
        self, backend: Backend, rows: Sequence[Row]
    ) -> tuple[PictureSupport, NDArray[np.float32], int]:
        """The embeddings for these rows, and the number of the first row in the tile."""
        if self.embeddings is None or backend.pictures is None:
            raise DecodeError("A picture was not encoded yet.")
        first = rows[0][1] - self.start
        return backend.pictures, self.embeddings[first : first + len(rows)], first


def expand_media(
    prompt: Sequence[int], media: Iterator[Medium], projector: Projector, n_batch: int
) -> tuple[tuple[int, ...], tuple[PlacedTile, ...]]:
    """The prompt with the next media's tokens in the places of MEDIUM, and where their tiles stand. Raises
    InvalidRequestError for what cannot be computed, in batches of at most `n_batch` rows."""
    tokens: list[int] = []
    placed: list[PlacedTile] = []
    for token in prompt:
        if token == MEDIUM:
            placed += _place(next(media), tokens, projector)
        else:
            tokens.append(token)
    _check(placed, len(tokens), n_batch)
    return tuple(tokens), tuple(placed)


def _place(medium: Medium, prompt: list[int], projector: Projector) -> list[PlacedTile]:
    placed: list[PlacedTile] = []
    for part in projector.layout(medium.size):
        if not isinstance(part, Tile):
            prompt += part
            continue
        if part.n_tokens < _LEAST_TOKENS:
            raise InvalidRequestError(cannot_be_used(medium.size), "messages")
        number = len(placed)
        said = projector.fingerprint + medium.key + number.to_bytes(4, "little")
        key = blake2b(said, digest_size=32).digest()
        placed.append(PlacedTile(len(prompt), part, medium, number, key))
        digest = shake_128(key).digest(4 * part.n_tokens)
        prompt += (np.frombuffer(digest, np.int32) | _NEGATIVE).tolist()
    return placed


def _check(placed: Sequence[PlacedTile], n_prompt: int, n_batch: int) -> None:
    if placed and placed[-1].end == n_prompt:
        raise InvalidRequestError(
            "Text must follow the last picture or sound of a prompt.", "prompt"
        )
    largest = max((one.tile.n_tokens for one in placed if not one.tile.causal), default=0)
    if largest > n_batch:
        raise InvalidRequestError(
            f"A picture has {largest} tokens, and this model computes them in one batch of {n_batch} at "
            "most, by engine.n_batch.",
            "messages",
        )


_SHAPES_KEPT = 64
_WEIGHT = 0.5


class NodeTimes:
    """Forecasts how long it is until the next look. Tiles of one shape have one graph: so the same
    look of the last ones tells. Decoder thread only."""

    def __init__(self) -> None:
        self._known: dict[Tile, list[float]] = {}
        self._times: list[float] = []
        self._n_looks = 0

    def begin(self, tile: Tile) -> None:
        """Note that a tile of that shape is encoded now."""
        if tile not in self._known and len(self._known) >= _SHAPES_KEPT:
            self._known.clear()
        self._times = self._known.setdefault(tile, [])
        self._n_looks = 0

    def observe(self, seconds: float) -> None:
        """Record the time until this look."""
        if self._n_looks < len(self._times):
            self._times[self._n_looks] += _WEIGHT * (seconds - self._times[self._n_looks])
        else:
            self._times.append(seconds)
        self._n_looks += 1

    @property
    def next_s(self) -> float:
        """Seconds until the next look; of a shape that is new, the most that it has been so far."""
        if self._n_looks < len(self._times):
            return self._times[self._n_looks]
        return max(self._times, default=0.0)


# The part of the stall budget that a step and a piece of encoding are planned for together. Of what the
# step leaves, the part that prompts leave to the encoding beside them.
_MARGIN, _BESIDE_PROMPTS = 0.84, 0.5
# The longest budget that encoding plans for, whatever the bound is.
_LONGEST_S = 1.0
# Seconds of a piece while nobody streams: how long who comes waits to be seen.
_CALM_S = 0.05
# And at least, however long steps take: pictures get on, too.
_LEAST_S = 0.01
# Pictures that are prepared at once: some megabytes each.
_PREPARED = 2
# How long a step without anything to compute waits for one.
_PATIENCE_S = 0.005


class TileEmbeddings:
    """The embeddings of tiles, by their keys; the least recently used go when it has too many bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.n_bytes = 0
        self._found: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: bytes) -> NDArray[np.float32] | None:
        """The embeddings of a tile, if they are still there."""
        if key in self._found:
            self._found.move_to_end(key)
        return self._found.get(key)

    def put(self, key: bytes, embeddings: NDArray[np.float32]) -> None:
        """Keep them, if they fit at all."""
        if key in self._found or embeddings.nbytes > self.max_bytes:
            return
        self._found[key] = embeddings
        self.n_bytes += embeddings.nbytes
        while self.n_bytes > self.max_bytes:
            _, oldest = self._found.popitem(last=False)
            self.n_bytes -= oldest.nbytes


class Encoding(Guest):
    """Encodes what running sequences are about to see, in the order in which they got their slots, and
    then a text's pictures. Each tile is encoded once for all. Decoder thread only; a thread of its own
    resizes pictures.

    libmtmd encodes a tile in one call, which may take seconds. It asks between the nodes of its graph
    whether to go on. There, on the same thread, an interlude serves all others. So there is one team of
    OpenMP threads, and streams wait no longer than for a chunk of somebody's prompt.
    """

    def __init__(
        self, projector: Projector, max_bytes: int, texts: EmbeddingQueue, steps: Steps
    ) -> None:
        self._projector, self._texts = projector, texts
        self._steps, self._counts = steps, steps.counts
        self.embeddings = TileEmbeddings(max_bytes)
        self._preparing = ThreadPoolExecutor(1, "corral-pictures")
        self._prepared: dict[bytes, Future[Any]] = {}
        self._nodes = NodeTimes()
        self._is_encoding = False
        self._piece_began = 0.0

    @property
    def _readers(self) -> list[TileReader]:
        return [*self._steps.running, *self._texts.readers]

    def before_schedule(self) -> None:
        """Give tiles what they were encoded to for others, and take it from those that are computed."""
        for reader in self._readers:
            for placed in _tiles(reader):
                if placed.end <= reader.n_past:
                    placed.embeddings = None
                elif placed.embeddings is None:
                    placed.embeddings = self.embeddings.get(placed.key)
                    self._counts.found_tiles += placed.embeddings is not None

    def after_step(self, step_s: float, *, idle: bool) -> None:
        """Encode a piece of a tile that somebody needs next, in the time that the next step probably
        leaves. If encoding fails, those end that need it. A step of an interlude does nothing here."""
        missing = next(_missing(self._readers), None)
        if self._is_encoding or missing is None:
            return
        reader, placed = missing
        try:
            if idle:
                turns.current().give()  # nothing is computed until the picture is prepared
            prepared = self._prepare(placed.medium, _PATIENCE_S if idle else 0)
            if prepared is not None:
                with turns.current().turn():
                    self._encode(reader, placed, prepared, step_s)
        except CorralError as error:
            self._prepared.pop(placed.medium.key, None)
            readers = _who_needs(placed, self._readers)
            self._texts.drop(readers, error)
            self._steps.end([one for one in readers if isinstance(one, EngineSequence)], error)

    def close(self, *, healthy: bool) -> None:
        """End the other thread."""
        self._preparing.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, medium: Medium, patience_s: float) -> Any:
        """A medium as it is encoded; None if that is not there yet. The medium that is needed
        after it is begun, too. Raises CorralError."""
        media = {tile.medium.key: tile.medium for _, tile in _missing(self._readers)}
        for key in self._prepared.keys() - media.keys():
            del self._prepared[key]
        for key, following in list(media.items())[:_PREPARED]:
            if key not in self._prepared:
                self._prepared[key] = self._preparing.submit(self._projector.prepare, following)
        try:
            return self._prepared[medium.key].result(patience_s)
        except TimeoutError:
            return None

    def _encode(self, reader: TileReader, placed: PlacedTile, prepared: Any, step_s: float) -> None:
        elsewhere_s = 0.0
        looked = began = self._piece_began = time.monotonic()
        allowed_s = self._allowed_s(step_s)

        def pause() -> bool:
            nonlocal elsewhere_s, looked, allowed_s
            now = time.monotonic()
            self._nodes.observe(now - looked)
            looked = now
            if now + self._nodes.next_s < self._piece_began + allowed_s:
                return True
            self._steps.interlude()
            looked = self._piece_began = time.monotonic()
            elsewhere_s += looked - now
            allowed_s = self._allowed_s(looked - now)
            return bool(_who_needs(placed, self._readers))

        self._nodes.begin(placed.tile)
        self._is_encoding = True
        try:
            embeddings = self._projector.encode(prepared, placed.number, pause)
        finally:
            self._is_encoding = False
        seconds = time.monotonic() - began - elsewhere_s
        self._counts.encode_s += seconds
        if reader in self._readers:
            self._steps.charge(reader, seconds)
        if embeddings is not None:
            self._counts.encoded_tiles += 1
            self.embeddings.put(placed.key, embeddings)
            placed.embeddings = embeddings

    def _allowed_s(self, step_s: float) -> float:
        readers, budget = self._readers, self._steps.budget
        if not any(one.n_generated for one in readers):
            return max(min(_CALM_S, budget.turn_left_s), _LEAST_S)
        bound_s = min(budget.max_stall_s, _LONGEST_S)
        left_s = _MARGIN * bound_s - budget.elapsed_s - budget.reserved_s - step_s
        if any(one.n_pending > 1 and not one.is_blocked for one in readers):
            left_s *= _BESIDE_PROMPTS
        return max(min(left_s, budget.turn_left_s), _LEAST_S)


def _tiles(reader: TileReader) -> list[PlacedTile]:
    return [span for span in reader.spans if isinstance(span, PlacedTile)]


def _missing(readers: Iterable[TileReader]) -> Iterator[tuple[TileReader, PlacedTile]]:
    for reader in sorted(readers, key=lambda one: one.is_behind):
        if not reader.is_finished:
            for placed in _tiles(reader):
                if placed.embeddings is None and placed.end > reader.n_past:
                    yield reader, placed


def _who_needs(placed: PlacedTile, readers: Iterable[TileReader]) -> list[TileReader]:
    return [reader for reader, one in _missing(readers) if one.key == placed.key]
