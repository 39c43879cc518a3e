"""The sequences of a model with paged attention: any rows of any sequences in one pass."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve_app.base.errors import DecodeError
from serve_app.base.formats import Row
from serve_app.kernels.llama.model import Model
from serve_app.kernels.llama.sampling.candidates import Candidates
from serve_app.kernels.openvino.graph import TOKENS
from serve_app.kernels.openvino.paged import compiling, shifts
from serve_app.kernels.openvino.paged.blocks import BLOCK, BlockTables
from serve_app.kernels.openvino.paged.model import HIGHEST, Layers, Operation, PagedOptions, Values

_LENGTH = 8
# So few rows of a sequence attend one by one, as rows of several sequences do. OpenVINO's attention of
# several rows of one sequence is for prompts, and slow behind long texts.
_MOST_APART = 4


class PagedContext:
    """Decodes batches of rows. Only one thread, always the same, may use it; any may call `cancel`.

    Sequences share blocks of `BLOCK` tokens where they are copies of each other.
    """

    def __init__(self, layers: Layers, model: Model, options: PagedOptions) -> None:
        """`model` has the vocabulary; its weights are not used."""
        self.model = model
        self.layers = layers
        self.n_ctx_slot = options.n_ctx_slot
        described = layers.run("describe", {})
        self.block_bytes = int(described["block_bytes"].sum())
        """The size of one block."""
        self.n_parameter_bytes = int(described["weight_bytes"].sum())
        self.turns = described["turns"].tobytes()
        """The format of each layer's keys, and how far positions turn them."""
        self._n_blocks = n_blocks = options.n_blocks
        self._first = first = options.context * (n_blocks + options.n_text_blocks)
        texts = range(first + n_blocks, first + n_blocks + options.n_text_blocks)
        self._tables = BlockTables(options.n_sequences, range(first, first + n_blocks))
        self._texts = BlockTables(options.n_texts, texts)
        self._rows: Sequence[Row] = ()
        self._logits: dict[int, NDArray[np.float32]] = {}
        self._n_told: dict[int, int] = {}
        """How many of the highest logits each row has; 0: all."""
        self._n_highest: dict[int, int] = {}
        """The number of the highest logits that each sequence's sampler asked for; without it, all."""
        self._keeps_states = options.keeps_states
        self._numbers = count(options.context, options.n_contexts)
        """The numbers under which parts of the model keep states; other contexts have others."""
        self._dropped = deque[int]()
        """The numbers of states that nobody has any more. Any thread may add one."""
        self.cancel, self.close = layers.cancel, layers.close

    @property
    def cache_bytes(self) -> int:
        """The size of all blocks but those for texts, whose memory is the system's until it is used."""
        return self._n_blocks * self.block_bytes

    @property
    def n_tokens(self) -> int:
        """The tokens that all blocks have room for."""
        return self._n_blocks * BLOCK

    def warm_up(self) -> None:
        """Compute a row and forget it."""
        self._pass([(0, 0, 0, True)], self._tables, compiling.SAMPLED, compiling.LOGITS, "warm_up")
        self.truncate(0, 0)

    def decode(self, rows: Sequence[Row]) -> None:
        """Compute a forward pass; blocks for its length, without the GIL. Raises CacheFullError, and
        changes nothing, if there are no blocks for the rows; DecodeCancelledError after `cancel(True)`, and
        another DecodeError if they cannot be computed: the cache is then as it was."""
        self._logits, self._n_told = self._outputs(rows, range(len(rows)))
        self._rows = rows

    def _outputs(
        self, rows: Sequence[Row], places: Sequence[int]
    ) -> tuple[dict[int, NDArray[np.float32]], dict[int, int]]:
        """The logits of the rows that want them, and how many of the highest each has, by the places of
        these rows in the batch."""
        logits, outputs, n_told = self._pass(
            rows, self._tables, compiling.SAMPLED, compiling.LOGITS
        )
        return (
            {places[row]: logits[at] for row, at in outputs.items()},
            {places[row]: n_told[at] for row, at in outputs.items()},
        )

    def embed(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """A vector for each row, from a pass over texts. Text 0 is kept until a row at position 0 begins
        another; the others are forgotten. Raises as `decode`."""
        if any(position == 0 and text == 0 for _, position, text, _ in rows):
            self._texts.truncate(0, 0)
        try:
            vectors, outputs, _ = self._pass(
                rows, self._texts, compiling.EMBEDDED, compiling.VECTORS
            )
            return vectors[[outputs[i] for i in range(len(rows))]]
        finally:
            for text in {row[2] for row in rows} - {0}:
                self._texts.truncate(text, 0)

    def _pass(
        self,
        rows: Sequence[Row],
        tables: BlockTables,
        chosen: str,
        output: str,
        operation: Operation = "compute",
    ) -> tuple[NDArray[np.float32], dict[int, int], list[int]]:
        """The output for the rows that want logits, which the input `chosen` names. Then where in it each
        of them is, and how many of the highest logits each has (0: all). If the rows cannot be computed,
        the tables are as before."""
        by_sequence: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            by_sequence.setdefault(row[2], []).append(i)
        before = {sequence: tables.length(sequence) for sequence in by_sequence}
        for sequence, indices in by_sequence.items():
            positions = [rows[i][1] for i in indices]
            if positions != list(range(before[sequence], before[sequence] + len(indices))):
                raise DecodeError("Rows must continue their sequence.")
        copies = tables.extend(
            {sequence: len(indices) for sequence, indices in by_sequence.items()}
        )
        order = [i for indices in by_sequence.values() for i in indices]
        wanted = [at for at, i in enumerate(order) if rows[i][3]] or [len(order) - 1]
        starts, lengths, blocks = [], [], []
        for sequence, indices in by_sequence.items():
            n_rows = 1 if len(indices) <= _MOST_APART else len(indices)
            for start in range(before[sequence], tables.length(sequence), n_rows):
                starts.append(start)
                lengths.append(n_rows)
                blocks.append(tables.blocks(sequence)[: -(-(start + n_rows) // BLOCK)])
        longest = max(tables.length(sequence) for sequence in by_sequence)
        inputs: Values = {
            TOKENS: np.array([rows[i][0] for i in order], np.int64),
            "position_ids": np.array([rows[i][1] for i in order], np.int64),
            "past_lens": np.array(starts, np.int32),
            "subsequence_begins": _begins(lengths),
            "block_indices": np.array([block for table in blocks for block in table], np.int32),
            "block_indices_begins": _begins([len(table) for table in blocks]),
            "max_context_len": np.array(longest, np.int32),
            compiling.SAMPLED: np.empty(0, np.int64),
            compiling.EMBEDDED: np.empty(0, np.int64),
            chosen: np.array(wanted, np.int64),
        }
        if copies:
            inputs["copies"] = np.array(copies, np.int64)
        if chosen == compiling.SAMPLED:
            wanting = [rows[order[at]] for at in wanted]
            n_highest = [self._n_highest.get(row[2], 0) if row[3] else 1 for row in wanting]
            inputs[HIGHEST] = np.array(n_highest, np.int32)
        try:
            values = self.layers.run(operation, inputs)
        except BaseException:
            for sequence, length in before.items():
                tables.truncate(sequence, length)
            raise
        places = {order[at]: n for n, at in enumerate(wanted)}
        return values[output], places, values.get(HIGHEST, np.zeros(len(wanted), int)).tolist()

    def logits(self, row: int, n_highest: int | None = None) -> NDArray[np.float32]:
        """The logits of a row of the last batch that asked for them: a view, until the next `decode`. The
        layers may have told the highest only, as many as a sampler of this sequence wanted before. If that
        is too few, the sequence's rows are computed anew. Raises as `decode`."""
        sequence = self._rows[row][2]
        if n_highest is None:
            self._n_highest.pop(sequence, None)
        else:
            self._n_highest[sequence] = n_highest
        n_told = self._n_told[row]
        if n_told and (n_highest is None or n_highest > n_told):
            self._compute_again(row)
        return self._logits[row]

    def _compute_again(self, first: int) -> None:
        """Compute the rows of the last batch from `first` on that are of the same sequence."""
        sequence = self._rows[first][2]
        places = [i for i in range(first, len(self._rows)) if self._rows[i][2] == sequence]
        rows = [self._rows[i] for i in places]
        self._tables.truncate(sequence, rows[0][1])
        logits, n_told = self._outputs(rows, places)
        self._logits |= logits
        self._n_told |= n_told

    def pick(self, sampler: Any, row: int) -> int:
        """The token that a chain of llama.cpp's samplers picks by that row's logits."""
        logits = self.logits(row)
        candidates = Candidates(np.arange(logits.size), logits)
        candidates.apply(sampler)
        return candidates.picked_token

    def truncate(self, seq_id: int, n_past: int) -> None:
        """Drop a sequence's tokens from position `n_past` on."""
        self._tables.truncate(seq_id, n_past)

    def copy(self, source: int, target: int) -> None:
        """Make sequence `target` a copy of sequence `source`. It costs nothing."""
        self._tables.share(source, target)

    def pretend(self, seq_id: int, n_tokens: int) -> None:
        """Give an empty sequence so many tokens without computing them, for measurements of time. Raises
        CacheFullError."""
        self._tables.extend({seq_id: n_tokens})
        self.layers.run("fill", {"blocks": np.array(self._tables.blocks(seq_id), np.int64)})

    def release(self) -> None:
        """Give the system the memory of all blocks, which are empty, and were measured with."""
        blocks = self._first, self._first + self._n_blocks
        self.layers.run("release", {"range": np.array(blocks, np.int64)})

    def shift(self, seq_id: int, cuts: Sequence[tuple[int, int]]) -> None:
        """Drop `n_discard` tokens after the first `n_keep`, for each (n_keep, n_discard) in turn; those
        behind get their places. Takes time that grows with what is behind. Raises CacheFullError if its
        blocks are shared, and there are none for the copy: the sequence is cut then."""
        places = shifts.kept_places(self._tables.length(seq_id), cuts)
        n_before = places - np.arange(len(places))
        n_stay = int(np.count_nonzero(n_before == 0)) // BLOCK * BLOCK
        old = list(self._tables.blocks(seq_id))
        self._tables.truncate(seq_id, n_stay)
        self._tables.extend({seq_id: len(places) - n_stay})
        new = self._tables.blocks(seq_id)[n_stay // BLOCK :]
        blocks = {"old": np.array(old, np.int64), "new": np.array(new, np.int64)}
        places, n_before = places[n_stay:], n_before[n_stay:]
        self.layers.run("shift", blocks | {"places": places, "n_before": n_before})

    def save(self, seq_id: int, *, cancellable: bool = False) -> memoryview:
        """The sequence's tokens as a state: its length and its blocks, layer by layer. Where parts of the
        model keep theirs, the state has its size, and takes no memory here, and `whole` has its bytes. With
        `cancellable`, raises DecodeCancelledError after `cancel(True)`."""
        length, blocks = self._tables.length(seq_id), self._tables.blocks(seq_id)
        values: Values = {
            "blocks": np.array(blocks, np.int64),
            "n_last": np.array((length - 1) % BLOCK + 1),
        }
        if cancellable:
            values["cancellable"] = np.empty(0, np.uint8)
        if self._keeps_states and length:
            return self._keep(length, values)
        values["state"] = np.frombuffer(length.to_bytes(_LENGTH, "little"), np.uint8)
        return self.layers.run("save", values)["state"].data

    def _keep(self, length: int, values: Values) -> memoryview:
        number = next(self._numbers)
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        state = np.zeros(_LENGTH + len(values["blocks"]) * self.block_bytes, np.uint8)
        state[: 2 * _LENGTH].view(np.int64)[:] = -length, number
        weakref.finalize(state, self._dropped.append, number).atexit = False
        more = {"number": np.array(number), "dropped": np.array(dropped, np.int64)}
        self.layers.run("save", values | more)
        return state.data

    def whole(self, state: bytes | memoryview) -> bytes | memoryview:
        """The state with all of its bytes, for other engines."""
        length, number = _head(state)
        if number is None:
            return state
        head = np.frombuffer(length.to_bytes(_LENGTH, "little"), np.uint8)
        return self.layers.run("read", {"number": np.array(number), "state": head})["state"].data

    def restore(self, seq_id: int, state: bytes | memoryview) -> None:
        """Fill a sequence with a state. Raises DecodeError if it is none of this model's, or there is no
        room: the sequence is empty then."""
        self.truncate(seq_id, 0)
        length, number = _head(state)
        n_blocks = -(-length // BLOCK)
        if len(state) != _LENGTH + n_blocks * self.block_bytes:
            raise DecodeError("The saved state cannot be used: it is of another size.")
        self._tables.extend({seq_id: length})
        values: Values = {"blocks": np.array(self._tables.blocks(seq_id), np.int64)}
        if number is None:
            values["state"] = np.frombuffer(state, np.uint8)[_LENGTH:]
        else:
            values["number"] = np.array(number)
        self.layers.run("restore", values)


def _head(state: bytes | memoryview) -> tuple[int, int | None]:
    """The length of a state, and the number under which its bytes are kept, if they are elsewhere."""
    length = int.from_bytes(state[:_LENGTH], "little", signed=True)
    if length >= 0:
        return length, None
    return -length, int.from_bytes(state[_LENGTH : 2 * _LENGTH], "little")


def _begins(lengths: Sequence[int]) -> NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
