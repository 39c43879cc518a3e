"""Logits behind a reused prefix, beside those of the same prompt computed anew.

Without flash attention and with Q8_0 weights they are the same, bit for bit, if the cells are: the property
tests of texts rest on that. With flash attention, whose kernels round by how many rows they get, they agree
within a tenth of the logits' spread. So do those behind a copy in one common cache: what follows lies in
cells further on, and attention adds in another order. That shows in few texts, by kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

import llama_cpp
import numpy as np
import pytest
from numpy.typing import NDArray

from serve_app.kernels.llama.context import Context, ContextOptions
from serve_app.kernels.llama.model import Model
from tools.random_models.model import SHAPES, write_random_gguf

TOKENS = [(7 * i + 3) % 200 for i in range(120)]
N_PREFIX = 96
LONG = 512
"""Cells of a sequence of which TOKENS are so few that they are copied as a state."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("model") / "exact.gguf"
    write_random_gguf(path, SHAPES["tiny"], "q8_0")
    return Model(path)


@pytest.fixture
def context(model: Model, request: pytest.FixtureRequest) -> Iterator[Context]:
    kv_unified, flash_attn, n_ctx_slot = request.param
    made = Context(
        model,
        ContextOptions(
            n_seq_max=4,
            n_ctx_slot=n_ctx_slot,
            n_batch=256,
            threads=1,
            flash_attn=flash_attn,
            kv_unified=kv_unified,
        ),
    )
    yield made
    made.close()


def decode(context: Context, seq_id: int, start: int, end: int) -> NDArray[np.float32]:
    """The logits after some of the tokens, in that sequence."""
    rows = [(TOKENS[i], i, seq_id, i == end - 1) for i in range(start, end)]
    context.decode(rows)
    pointer = llama_cpp.llama_get_logits_ith(context.pointer, len(rows) - 1)
    return np.ctypeslib.as_array(pointer, (context.model.n_vocab,)).copy()


def reuse(context: Context, way: str) -> int:
    """Have the first tokens in a sequence, by copying or restoring them; returns its id."""
    decode(context, 0, 0, N_PREFIX + 10)
    if way == "in place":
        context.truncate(0, N_PREFIX)
        return 0
    if way == "copied":
        context.copy(0, 1)
    else:
        context.restore(1, context.save(0))
    context.truncate(1, N_PREFIX)
    return 1


@pytest.mark.parametrize(
    "context",
    [
        (False, False, 256),
        (False, False, LONG),
        (False, True, 256),
        (True, False, 256),
        (True, True, 256),
    ],
    ids=["split", "split, long sequences", "split, flash", "unified", "unified, flash"],
    indirect=True,
)
@pytest.mark.parametrize("way", ["in place", "copied", "restored"])
def test_reused_and_fresh_prefixes_agree(
    context: Context, way: str, request: pytest.FixtureRequest
) -> None:
    fresh = decode(context, 2, 0, len(TOKENS))
    context.truncate(2, 0)
    seq_id = reuse(context, way)
    reused = decode(context, seq_id, N_PREFIX, len(TOKENS))
    if "flash" in request.node.callspec.id or request.node.callspec.id == "copied-unified":
        np.testing.assert_allclose(reused, fresh, rtol=0, atol=0.1 * float(fresh.std()))
    else:
        np.testing.assert_array_equal(reused, fresh)


@pytest.mark.parametrize("context", [(False, False, LONG)], indirect=True)
def test_copies_are_of_what_a_sequence_holds_at_that_time(context: Context) -> None:
    """Whether llama.cpp makes them at once or with the next decode."""
    others = [(1, i, 3, False) for i in range(8)]
    context.decode(others)
    other = context.save(3)
    after_other = decode(context, 3, 8, len(TOKENS))
    context.truncate(3, 0)
    fresh = decode(context, 3, 0, len(TOKENS))
    context.truncate(3, 0)
    context.decode(others)

    decode(context, 0, 0, N_PREFIX)
    context.copy(0, 1)  # at once
    context.restore(0, other)
    context.copy(0, 2)  # and anew, as that has changed
    np.testing.assert_array_equal(decode(context, 1, N_PREFIX, len(TOKENS)), fresh)
    np.testing.assert_array_equal(decode(context, 2, 8, len(TOKENS)), after_other)

    context.decode([(1, i, 1, False) for i in range(len(TOKENS), LONG // 2)])
    context.copy(1, 3)  # with the next decode
    context.truncate(3, N_PREFIX)
    context.copy(3, 0)  # of what is still to be written
    for seq_id in (3, 0):
        context.truncate(seq_id, N_PREFIX)
        np.testing.assert_array_equal(decode(context, seq_id, N_PREFIX, len(TOKENS)), fresh)


@pytest.mark.parametrize("context", [(False, False, 256), (True, False, 256)], indirect=True)
def test_a_shift_leaves_the_rest_in_place(context: Context) -> None:
    """Moved cells' values are those of the full context, so only nearly what would be computed anew; but
    their positions are right, and the next token can follow."""
    decode(context, 0, 0, len(TOKENS))
    context.shift(0, 4, 50)
    shifted = TOKENS[:4] + TOKENS[54:]
    context.decode([(TOKENS[0], len(shifted), 0, True)])
    context.truncate(0, 0)
    context.decode([(token, i, 0, i == 3) for i, token in enumerate(shifted[:4])])
