"""The backend protocol: what the engine needs of a model. `tests.doubles.backend` is a scripted one.

Except for `Vocabulary`, which is immutable, and `cancel`, everything is used by the decoder thread alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from serve_app.base.formats import EmbeddingPooling, Row, State
from serve_app.base.sampling import SamplingParams, Triggers
from serve_app.base.values.adapters import Adapters
from serve_app.base.values.answers import Sampled, TokenLogprobs
from serve_app.base.values.media import Medium, Size
from serve_app.engine.choice.plan import CachePlan, Plan
from serve_app.engine.costs.cost_model import Profile
from serve_app.kernels.llama.grammars.constraint import Constraint
from serve_app.kernels.llama.vision.positions import Part, Pause, Tile


class Vocabulary(Protocol):
    """The model's tokens. Any thread."""

    @property
    def n_vocab(self) -> int:
        """Token ids are 0 to n_vocab - 1."""

    @property
    def vocabulary_key(self) -> bytes:
        """A key that tells this vocabulary from others."""

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes that the token stands for: not always whole characters, empty for control tokens, or
        with `special` their names."""

    def is_eog(self, token: int) -> bool:
        """Whether the token ends an answer."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of a text."""

    def constraint(self, grammar: str, triggers: Triggers | None = None) -> Constraint:
        """A constraint that keeps a sequence to a grammar. Raises InvalidRequestError for a bad grammar."""

    def history(self, params: SamplingParams, n_ctx_slot: int, prompt: Sequence[int]) -> object:
        """The samplers that look at last tokens, told of this prompt, for sequences to copy. Callers share
        them as long as one keeps them. Raises InvalidRequestError for breakers that cost too much."""


class Sampler(Protocol):
    """Picks the tokens of one sequence."""

    def sample(self, row: int) -> Sampled:
        """The next token, from the logits of that row (an index into the rows last decoded). Raises
        ConstraintError if the request's grammar allows none."""

    def score(self, row: int, token: int) -> TokenLogprobs:
        """How likely that token was by the logits of that row."""

    def close(self) -> None:
        """Free what it holds."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory that a model needs, in bytes."""

    weights_bytes: int
    cache_bytes: int
    """Keys and values of all slots."""
    cache_bytes_per_slot: int
    """The bytes that one more slot would add."""
    cache_bytes_per_token: int
    """The bytes of a token in layers that see everything."""
    compute_bytes: int
    window: int = 0
    """Tokens that layers with a window look back on."""
    window_bytes_per_token: int = 0
    """The bytes of a token in layers with a window."""
    recurrent_bytes: int = 0
    """The states of one slot's recurrent layers."""
    rewind_bytes: int = 0
    """The part of `cache_bytes` that past states of recurrent layers take."""

    def state_bytes(self, n_tokens: int) -> int:
        """The size of a saved slot with so many tokens."""
        return n_tokens * self.cache_bytes_per_token + self.checkpoint_bytes(n_tokens)

    def checkpoint_bytes(self, n_tokens: int) -> int:
        """The size of a checkpoint of a slot with so many tokens."""
        in_window = min(n_tokens, self.window)
        return in_window * self.window_bytes_per_token + self.recurrent_bytes * bool(n_tokens)


@dataclass(frozen=True, slots=True)
class EmbeddingShape:
    """How large batches of texts to be embedded may be."""

    n_rows: int
    """Most tokens in a batch."""
    n_seq_max: int
    n_text: int
    pooling: EmbeddingPooling
    """How the vectors of a text's tokens become one; `rank` for the outputs of a classifier."""
    causal: bool
    """Whether tokens see only those before them: a text can be computed in parts, and continued."""


class Projector(Protocol):
    """Makes embeddings of pictures and sounds."""

    sees: bool
    """Whether it takes pictures."""
    hears: bool
    """Whether it takes sounds."""
    causal: bool
    """Whether the rows of all pictures' tiles see only those before them."""
    fingerprint: bytes
    """A hash of all that embeddings depend on, besides the picture."""

    def layout(self, size: Size) -> tuple[Part, ...]:
        """Any thread: what media of that size become in a prompt. Raises InvalidRequestError."""

    def prepare(self, medium: Medium) -> Any:
        """Any thread: what `encode` takes. Raises InvalidRequestError."""

    def encode(
        self, prepared: Any, tile: int, pause: Pause | None = None
    ) -> NDArray[np.float32] | None:
        """The embeddings of a tile; None if `pause`, which is called now and then, ended it. The
        backend may decode meanwhile. Raises DecodeError."""


GUESSED = -1
"""The place of a row that a draft model proposed itself."""


class DraftModel(Protocol):
    """A model that proposes tokens, with a cache of its own. It is a small one of the same vocabulary
    (`serve_app.engine.backends.draft_model.LlamaDraft`), or the other model's own prediction layers
    (`serve_app.engine.backends.draft_model.OwnLayersDraft`)."""

    reads_states: bool
    """Whether it goes by the other model's hidden states."""

    def first_fed(self, seq_id: int) -> int:
        """The first place in the text of the other model's slot from which on `decode` can be fed."""

    n_ctx: int
    """Tokens that each slot holds."""
    n_batch: int
    """Most rows of a batch."""
    profile: Profile
    """The cost of batches; empty if that was not measured."""

    def decode(self, rows: Sequence[Row], places: Sequence[int]) -> None:
        """Compute a forward pass. `places` says where each row is in the other model's text, or `GUESSED`.
        Raises DecodeError if the rows cannot be decoded; some may be in the cache."""

    def most_likely(self, row: int) -> int:
        """The token of the other model's vocabulary that is most likely behind a row last decoded."""

    def truncate(self, seq_id: int, n_past: int) -> None:
        """Drop the slot's cached tokens from index n_past on."""


@dataclass(frozen=True, slots=True)
class CacheTraits:
    """The abilities of a model's cache that the engine makes use of."""

    n_rewind: int
    """Tokens of each slot that can be dropped behind a batch that llama.cpp computes in one piece. All
    (`sys.maxsize`), or as many as recurrent layers keep past states of; 0: none."""
    can_shift: bool
    """Whether `Backend.shift` takes next to no time, so that parts of earlier prompts are moved by it."""
    fills_gaps: bool
    """Whether only consecutive slots are computed together, and rows can be added to those between and
    dropped again without a trace."""
    forgets: bool
    """Whether slots keep less than all of their tokens, in layers with a window or recurrent ones. They
    can be cut only where `can_cut` says so, or put back to a checkpoint."""


class AdapterSupport(Protocol):
    """LoRA adapters, by their keys. At first, `decode` computes with none."""

    @property
    def loaded_keys(self) -> Collection[str]:
        """Any thread. The keys of the adapters that are loaded."""

    def use(self, adapters: Adapters) -> None:
        """Have `decode` compute with these adapters from now on. Raises DecodeError for adapters that
        are not loaded."""

    def load(self, key: str, path: Path) -> None:
        """Load an adapter from a file. Nothing changes if there is one of that key. Raises ConfigError for
        a file that cannot be used."""

    def free(self, key: str) -> None:
        """Unload the adapter, which `decode` does not compute with. Idempotent."""


class PictureSupport(Protocol):
    """Pictures and sounds as rows of a batch."""

    @property
    def projector(self) -> Projector:
        """The projector, which makes embeddings."""

    def decode(
        self, rows: Sequence[Row], embeddings: NDArray[np.float32], tile: Tile, first: int
    ) -> None:
        """Decode like `Backend.decode` rows of one slot that are those of one tile from its `first` token
        on: `embeddings` are computed in the places of their tokens."""

    def embed(
        self, rows: Sequence[Row], embeddings: NDArray[np.float32], tile: Tile, first: int
    ) -> NDArray[np.float32]:
        """Compute vectors like `EmbeddingSupport.embed` of such rows of the text 0."""


class EmbeddingSupport(Protocol):
    """Vectors of texts, in a cache apart from the slots'."""

    @property
    def shape(self) -> EmbeddingShape:
        """Any thread. The limits of `embed`."""

    def embed(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """A vector for each row; what the batch needs is made at the first call. Of a model with a
        classifier, its outputs for the row's text up to here.

        A `seq_id` has one text, which begins at position 0. Only 0 keeps it for the next batch. Raises
        DecodeError, or ConfigError without memory for it; the texts are to be begun anew then."""


class StateSupport(Protocol):
    """Saved slots. A slot with a pending copy can be neither saved nor restored."""

    @property
    def key(self) -> bytes:
        """A key of all that saved states depend on: they can be restored wherever it is the same."""

    def save(self, seq_id: int, *, cancellable: bool = False) -> State:
        """The slot's cached tokens as a state that `restore` takes. If `cancellable`, raises
        DecodeCancelledError when it was cancelled."""

    def whole(self, state: State) -> State:
        """A saved state with all of its bytes, for other engines and files: some of it may be elsewhere."""

    def restore(self, seq_id: int, state: State) -> None:
        """Make the slot what it was when the state was saved, of this slot or another one, whatever
        it held. Raises DecodeError if it cannot; the slot is then in no known state."""

    def checkpoint(self, seq_id: int) -> State:
        """The part of the slot's present state that could not be restored later."""

    def rewind(self, seq_id: int, checkpoint: State, n_past: int) -> None:
        """Put a slot back to a checkpoint, of itself or another one, that had just its first `n_past`
        tokens then. Raises DecodeError if it cannot; the slot is then in no known state."""


class ModeSupport(Protocol):
    """The change to the other kind of cache, which was measured too."""

    @property
    def change_s(self) -> float:
        """Seconds that `change` takes."""

    def change(self, reason: str, learned: Profile) -> None:
        """Have the other mode, for that reason: all slots are empty then. The costs `learned` until now are
        kept for a change back. States that were saved can still be restored. Raises ConfigError if there is
        no memory for any cache; nothing may be decoded then."""


class Backend(Protocol):
    """A model and a context in which each slot has a `seq_id`: its own id."""

    @property
    def plan(self) -> Plan:
        """The decisions of the start."""

    @property
    def cache_plan(self) -> CachePlan:
        """The mode that its cache has now. The profile is empty if nothing was measured."""

    @property
    def vocabulary(self) -> Vocabulary:
        """Any thread. The model's vocabulary."""

    @property
    def memory(self) -> MemoryUse:
        """The memory that it holds."""

    @property
    def traits(self) -> CacheTraits:
        """The abilities of its cache."""

    def decode(self, rows: Sequence[Row]) -> None:
        """Compute a forward pass over these rows. Raises CacheFullError, having changed nothing, if the
        cache has no room for them. Raises DecodeCancelledError if it was cancelled, and another
        DecodeError if they cannot be decoded. Some of them are in the cache then, for the caller to
        `truncate`. Any other exception means that the backend is broken."""

    def cancel(self, cancelled: bool) -> None:
        """Any thread: have the `decode` that runs, and those to come, end early with DecodeCancelledError;
        or, with False, have them compute again. The same holds for a cancellable `save`. A backend that
        could not forget half of a pass need not."""

    def sampler(
        self, params: SamplingParams, prompt: Sequence[int], constraint: Constraint | None
    ) -> Sampler:
        """A sampler for one sequence, kept to a grammar that took nothing yet."""

    def truncate(self, seq_id: int, n_past: int) -> None:
        """Drop the slot's cached tokens from index n_past on. Raises DecodeError, and changes
        nothing, if the model's memory cannot be cut there; it can always be cut at 0. Some models' cannot
        be cut within a tile."""

    def can_cut(self, seq_id: int, n_past: int) -> bool:
        """Whether `truncate` can."""

    def copy(self, source: int, target: int) -> None:
        """Make the target slot a copy of the source, whatever it held."""

    def shift(self, seq_id: int, cuts: Sequence[tuple[int, int]]) -> None:
        """Drop `n_discard` tokens after the first `n_keep`, for each (n_keep, n_discard) in turn, and give
        those behind the positions before theirs. Raises DecodeError if it cannot; the slot is then in no
        known state."""

    @property
    def slots_with_pending_copy(self) -> Set[int]:
        """Slots that the next `decode` will read or write besides, for a copy or a shift: until then, they
        may be neither saved nor restored."""

    def keep(self, profile: Profile) -> None:
        """Have the next start, and a change back to this kind of cache, begin with these costs."""

    def close(self) -> None:
        """Free everything; nothing is called afterwards."""

    @property
    def states(self) -> StateSupport:
        """Saved slots."""

    @property
    def embeddings(self) -> EmbeddingSupport:
        """Vectors of texts."""

    @property
    def adapters(self) -> AdapterSupport | None:
        """LoRA adapters; None if it takes none."""

    @property
    def pictures(self) -> PictureSupport | None:
        """Pictures and sounds, if the model sees or hears."""

    @property
    def draft(self) -> DraftModel | None:
        """The draft model, if there is one."""

    @property
    def modes(self) -> ModeSupport | None:
        """The other kind of cache; None if the kind is not to be changed, or nothing was measured."""
