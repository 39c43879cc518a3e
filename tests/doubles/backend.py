"""A scripted backend: the engine and all above it, tested without a model."""

from __future__ import annotations

import math
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serve_app.base.errors import (
    CacheFullError,
    DecodeCancelledError,
    DecodeError,
    InvalidRequestError,
)
from serve_app.base.formats import Row, State
from serve_app.base.sampling import SamplingParams, Triggers
from serve_app.base.values.adapters import Adapters
from serve_app.base.values.answers import Sampled, TokenLogprobs
from serve_app.engine.backends.base import (
    CacheTraits,
    DraftModel,
    EmbeddingShape,
    MemoryUse,
    Projector,
)
from serve_app.engine.choice.plan import CachePlan, Mode, Plan
from serve_app.engine.costs.cost_model import Profile
from serve_app.kernels.llama.grammars.constraint import Constraint
from serve_app.kernels.llama.vision.positions import Positions, Tile

Script = Callable[[Sequence[int]], int]
"""The token that follows the given tokens of one sequence."""


class FakeVocabulary:
    """256 tokens that are the bytes, and token 256, which ends a generation."""

    n_vocab = 257
    vocabulary_key = b"fake"
    eos = 256

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The byte itself; nothing for the end token."""
        if token == self.eos:
            return b"</s>" if special else b""
        return bytes([token])

    def is_eog(self, token: int) -> bool:
        """True for token 256."""
        return token == self.eos

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """The text's bytes."""
        return list(text.encode())

    def constraint(self, grammar: str, triggers: Triggers | None = None) -> Constraint:
        """There is none."""
        raise InvalidRequestError("A scripted vocabulary has no grammars.", "grammar")

    def history(self, params: SamplingParams, n_ctx_slot: int, prompt: Sequence[int]) -> object:
        """Nothing: scripts have no samplers."""
        return None


class FakeAdapters:
    """Adapters that are only names."""

    def __init__(self) -> None:
        self.loaded_keys: set[str] = set()
        self.used: Adapters = ()

    def use(self, adapters: Adapters) -> None:
        """Have the batches that follow computed with these adapters."""
        if not {one.key for one in adapters} <= self.loaded_keys:
            raise DecodeError("scripted adapter is gone")
        self.used = adapters

    def load(self, key: str, path: Path) -> None:
        """Add the name; no file is read."""
        self.loaded_keys.add(key)

    def free(self, key: str) -> None:
        assert key not in {one.key for one in self.used}
        self.loaded_keys.discard(key)


class FakeStates:
    """Saved slots of a scripted backend."""

    def __init__(self, backend: FakeBackend) -> None:
        self.key = backend.state_key
        self.save, self.restore, self.whole = backend.save, backend.restore, backend.whole
        self.checkpoint, self.rewind = backend.checkpoint, backend.rewind


class FakeEmbeddings:
    """Texts of a scripted backend."""

    def __init__(self, backend: FakeBackend) -> None:
        self.shape, self.embed = backend.embedding, backend.embed


class FakePictures:
    """Pictures of a scripted backend."""

    def __init__(self, backend: FakeBackend, projector: Projector) -> None:
        self.projector = projector
        self.decode, self.embed = backend.decode_tile, backend.embed_tile


class FakeModes:
    """The change of a scripted backend's cache."""

    def __init__(self, backend: FakeBackend) -> None:
        self._backend, self.change = backend, backend.change

    @property
    def change_s(self) -> float:
        """Seconds that a change takes, as the test says."""
        return self._backend.change_s


class FakeBackend:
    """Keeps what every slot was fed, and samples from a script.

    `script(tokens)` gives the token that follows a slot's tokens. `fail_on` names token ids: a batch
    with one of them raises DecodeError after its rows were fed, as llama.cpp may. `break_after`
    batches, the backend breaks for good. All slots together hold `n_cells` tokens, and each of a split
    cache the attribute `n_share`. `hold()` stops decoding until `resume()`. Rows that llama.cpp could not
    take (a position that does not continue the slot, or behind its share) raise AssertionError, and so do
    saving and restoring a slot that llama.cpp has yet to write.
    If it `forgets`, slots cannot be cut, as with recurrent layers, but put back to a checkpoint; by up to
    `n_rewind` tokens, also behind a batch with as many rows for each of its slots, which are consecutive or
    in a unified cache.
    """

    def __init__(
        self,
        script: Script,
        *,
        n_slots: int,
        step_s: float = 0.0,
        fail_on: Iterable[int] = (),
        break_after: int | None = None,
        n_cells: int | None = None,
        forgets: bool = False,
    ) -> None:
        self.forgets = forgets
        self.plan = Plan(why="scripted")
        self.memory = MemoryUse(0, 0, 0, 4, 0)
        self.mode = Mode(flash_attn=False, kv_unified=n_cells is not None)
        self.mode_reason = "scripted"
        self.profile = Profile()
        self.other: tuple[Mode, Profile] | None = None
        self.change_s = 0.0
        self.n_rewind = 0 if forgets else sys.maxsize
        self.can_shift = True
        self.fills_gaps = n_cells is None and not forgets
        self.state_key = b"fake"
        self.vocabulary = FakeVocabulary()
        self.slots: list[list[int]] = [[] for _ in range(n_slots)]
        self.batches: list[list[Row]] = []
        """Every batch that was submitted."""
        self.used_adapters: list[Adapters] = []
        """The adapters of each."""
        self.projector: Projector | None = None
        self.positions = Positions(several=False)
        """With several dimensions, slots cannot be cut within tiles, as with M-RoPE."""
        self.draft: DraftModel | None = None
        self.adapters = FakeAdapters()
        self.embedding = EmbeddingShape(16, 8, n_text=32, pooling="mean", causal=True)
        self.embed_batches: list[list[Row]] = []
        """Every batch of texts to be embedded."""
        self.open_samplers = 0
        self.closed = False
        self._script = script
        self._step_s = step_s
        self._fail_on = frozenset(fail_on)
        self._break_after = break_after
        self._n_cells = n_cells
        self.n_share: int | None = None
        self._changed = threading.Condition()
        self._held = self._cancelled = False
        self.n_waiting = 0
        """Calls that wait in `hold`."""
        self.slots_with_pending_copy: set[int] = set()
        self._texts: dict[int, list[int]] = {}
        self._at_row: dict[int, list[int]] = {}
        self._rewinds: dict[int, int] = {}

    def hold(self) -> None:
        """Make the next `decode` wait."""
        self._set(held=True)

    def resume(self) -> None:
        """Let decoding go on."""
        self._set(held=False)

    def cancel(self, cancelled: bool) -> None:
        """See Backend.cancel; a `decode` that was held waits no longer, and its rows stay in the slots."""
        self._set(cancelled=cancelled)

    def _set(self, *, held: bool | None = None, cancelled: bool | None = None) -> None:
        with self._changed:
            self._held = self._held if held is None else held
            self._cancelled = self._cancelled if cancelled is None else cancelled
            self._changed.notify_all()

    def _wait(self) -> bool:
        """Until it may run; whether it is cancelled instead."""
        with self._changed:
            self.n_waiting += 1
            self._changed.wait_for(lambda: self._cancelled or not self._held)
            self.n_waiting -= 1
            return self._cancelled

    # -- capabilities -----------------------------------------------------------------------------

    @property
    def cache_plan(self) -> CachePlan:
        """The attributes `mode`, `profile` and others, which tests set."""
        return CachePlan(self.mode, self.mode_reason, self.profile, self.other)

    def keep(self, profile: Profile) -> None:
        """Have these costs from now on."""
        self.profile = profile

    @property
    def traits(self) -> CacheTraits:
        """The attributes of the same names, which tests set."""
        return CacheTraits(self.n_rewind, self.can_shift, self.fills_gaps, self.forgets)

    @property
    def states(self) -> FakeStates:
        """Saved slots."""
        return FakeStates(self)

    @property
    def embeddings(self) -> FakeEmbeddings:
        """Vectors of texts."""
        return FakeEmbeddings(self)

    @property
    def pictures(self) -> FakePictures | None:
        """Pictures, if a test set a `projector`."""
        return None if self.projector is None else FakePictures(self, self.projector)

    @property
    def modes(self) -> FakeModes | None:
        """The other kind of cache, if a test set `other`."""
        return None if self.other is None else FakeModes(self)

    # -- running ----------------------------------------------------------------------------------

    def decode(self, rows: Sequence[Row]) -> None:
        """Feed the rows to their slots."""
        left = self._wait()
        time.sleep(self._step_s)
        self.batches.append(list(rows))
        self.used_adapters.append(self.adapters.used)
        if self._break_after is not None and len(self.batches) > self._break_after:
            raise RuntimeError("scripted break")
        if self._n_cells is not None and sum(map(len, self.slots)) + len(rows) > self._n_cells:
            raise CacheFullError("scripted cache is full")
        share = math.inf if self.n_share is None or self.mode.mixes else self.n_share
        if any(position >= share for _, position, _, _ in rows):
            raise AssertionError(f"rows behind a slot's share of {share} cells")
        self._at_row = {}
        self.slots_with_pending_copy.clear()
        for i, (token, position, seq_id, wants_logits) in enumerate(rows):
            if token >= 0:
                self.positions.of(seq_id, position)
            slot = self.slots[seq_id]
            if position != len(slot):
                raise AssertionError(f"row {i}: position {position} in a slot of {len(slot)}")
            slot.append(token)
            if wants_logits:
                self._at_row[i] = list(slot)
        counts = Counter(row[2] for row in rows)
        is_consecutive = max(counts) - min(counts) < len(counts)
        if len(set(counts.values())) == 1 and (self.mode.kv_unified or is_consecutive):
            self._rewinds = {slot: min(self.n_rewind, n - 1) for slot, n in counts.items()}
        else:
            self._rewinds = {}
        if left:
            raise DecodeCancelledError("cancelled")
        if self._fail_on.intersection(row[0] for row in rows):
            raise DecodeError("scripted failure")

    def decode_tile(
        self, rows: Sequence[Row], embeddings: NDArray[np.float32], tile: Tile, first: int
    ) -> None:
        """Feed the rows: their tokens tell what is seen. There must be an embedding for each."""
        if len(embeddings) != len(rows):
            raise AssertionError(f"{len(embeddings)} embeddings for {len(rows)} rows")
        _, index, seq_id, _ = rows[0]
        self.positions.take(seq_id, index - first, tile, first, len(rows))
        self.decode(rows)

    def sampler(
        self, params: SamplingParams, prompt: Sequence[int], constraint: Constraint | None
    ) -> FakeSampler:
        """A sampler that follows the script."""
        self.open_samplers += 1
        return FakeSampler(self)

    def sample(self, row: int) -> int:
        """The token that the script has after that row."""
        return self._script(self._at_row[row])

    def n_before(self, row: int) -> int:
        """How many tokens the slot had with that row."""
        return len(self._at_row[row])

    def truncate(self, seq_id: int, n_past: int) -> None:
        """Drop a slot's tail."""
        if not self.can_cut(seq_id, n_past):
            raise DecodeError("scripted slots that cannot be cut")
        self._rewinds.pop(seq_id, None)
        del self.slots[seq_id][n_past:]
        self.positions.cut(seq_id, n_past)

    def can_cut(self, seq_id: int, n_past: int) -> bool:
        """Whether it does not forget, or there is nothing to be left, or no more to be cut than it can
        rewind; not within a tile."""
        if self.positions.divides(seq_id, n_past):
            return False
        n_cut = len(self.slots[seq_id]) - n_past
        return not self.forgets or n_past == 0 or n_cut <= self._rewinds.get(seq_id, 0)

    def checkpoint(self, seq_id: int) -> bytes:
        """The slot's tokens, four bytes each."""
        return self.save(seq_id)

    def rewind(self, seq_id: int, checkpoint: State, n_past: int) -> None:
        """Drop a slot's tail; what is left has to be what the checkpoint has."""
        self._expect_settled(seq_id)
        checkpoint, _ = self.positions.split(checkpoint)
        kept = list(struct.unpack(f"{len(checkpoint) // 4}i", checkpoint))
        if kept != self.slots[seq_id][:n_past]:
            raise AssertionError(f"slot {seq_id} is put back to a checkpoint of other tokens")
        self.slots[seq_id] = kept
        self.positions.cut(seq_id, n_past)

    def copy(self, source: int, target: int) -> None:
        """Copy a slot; without a unified cache, the next decode does it, as in llama.cpp."""
        if not self.mode.kv_unified:
            self.slots_with_pending_copy |= {source, target}
        self.slots[target] = list(self.slots[source])
        self.positions.copy(source, target)

    def shift(self, seq_id: int, cuts: Sequence[tuple[int, int]]) -> None:
        """Drop tokens in a slot's middle."""
        self._expect_settled(seq_id)
        if not self.can_shift:
            raise DecodeError("scripted slots that cannot be shifted")
        self.slots_with_pending_copy.add(seq_id)
        for n_keep, n_discard in cuts:
            del self.slots[seq_id][n_keep : n_keep + n_discard]

    def save(self, seq_id: int, *, cancellable: bool = False) -> bytes:
        """The slot's tokens, four bytes each."""
        self._expect_settled(seq_id)
        if cancellable and self._wait():
            raise DecodeCancelledError("The state was not saved.")
        tokens = struct.pack(f"{len(self.slots[seq_id])}i", *self.slots[seq_id])
        return tokens + self.positions.pack(seq_id)

    def whole(self, state: State) -> State:
        """All of it is here."""
        return state

    def restore(self, seq_id: int, state: State) -> None:
        """Make the slot those tokens."""
        self._expect_settled(seq_id)
        state, tiles = self.positions.split(state)
        self.slots[seq_id] = list(struct.unpack(f"{len(state) // 4}i", state))
        self.positions.put(seq_id, tiles)

    def change(self, reason: str, learned: Profile) -> None:
        """Empty all slots, and have the other mode."""
        if self.other is None:
            raise AssertionError("there is no other mode")
        own = self.mode, learned
        (self.mode, self.profile), self.other = self.other, own
        self.mode_reason, self.fills_gaps = reason, not self.mode.kv_unified
        self.slots_with_pending_copy.clear()
        self.slots = [[] for _ in self.slots]

    def embed(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """For each row: its token, its position, and the sum of its text's tokens up to it."""
        self._wait()
        self.embed_batches.append(list(rows))
        if self._fail_on.intersection(row[0] for row in rows):
            raise DecodeError("scripted failure")
        vectors = []
        for token, position, seq_id, _ in rows:
            text = self._texts.setdefault(seq_id, [])
            if position == 0:
                text.clear()
            if position != len(text):
                raise AssertionError(f"position {position} in a text of {len(text)}")
            text.append(token)
            vectors.append([token, position, sum(text)])
        self._texts = {0: self._texts.get(0, [])}
        return np.array(vectors, np.float32)

    def embed_tile(
        self, rows: Sequence[Row], embeddings: NDArray[np.float32], tile: Tile, first: int
    ) -> NDArray[np.float32]:
        """For each row what `embed` has: its token tells what is seen. Each has an embedding."""
        if len(embeddings) != len(rows):
            raise AssertionError(f"{len(embeddings)} embeddings for {len(rows)} rows")
        return self.embed(rows)

    def _expect_settled(self, seq_id: int) -> None:
        if seq_id in self.slots_with_pending_copy:
            raise AssertionError(f"slot {seq_id} is still to be written by the next decode")

    def close(self) -> None:
        """Remember that it was closed."""
        self.closed = True


class FakeSampler:
    """Follows its backend's script."""

    def __init__(self, backend: FakeBackend) -> None:
        self._backend = backend

    def sample(self, row: int) -> Sampled:
        """The scripted token."""
        return Sampled(self._backend.sample(row))

    def score(self, row: int, token: int) -> TokenLogprobs:
        """The less likely, the more tokens are before it; the most likely one is the scripted one."""
        return TokenLogprobs(
            -float(self._backend.n_before(row)), ((self._backend.sample(row), 0.0),)
        )

    def close(self) -> None:
        """Counted, so that tests see a leak."""
        self._backend.open_samplers -= 1
