"""A model in several parts, each with its layers and their cache, beside the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from mmap import PAGESIZE
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from serve_app.base.errors import ConfigError, DecodeError
from serve_app.base.formats import Quantization
from serve_app.kernels.llama.model import Model
from tests.integration.openvino.random_models import Made
from tests.unit.kernels.openvino.paged.test_compiling import resident

pytest.importorskip("openvino", reason="corral[openvino] is not installed")

from serve_app.kernels.openvino import convert
from serve_app.kernels.openvino.gguf_model import EmbeddingRows, readable
from serve_app.kernels.openvino.paged.context import PagedContext
from serve_app.kernels.openvino.paged.model import Operation, PagedModel, PagedOptions, Values
from serve_app.kernels.openvino.parts import ModelPart
from serve_app.plugins.stages.logits import highest_of, rows_of

_OPTIONS = PagedOptions(
    n_sequences=3, n_ctx_slot=256, n_blocks=24, threads=1, n_texts=2, n_text_blocks=8
)
_WINDOW = {"attention.sliding_window": 24, "attention.sliding_window_pattern": [True, False] * 2}
MODELS = {
    "qwen3-tied": Made("qwen3", tied=True, n_layer=4),
    "gemma3": Made("gemma3", tied=True, n_layer=4, metadata=_WINDOW),
    "smollm3": Made("smollm3", n_layer=4),
}


class InTurns:
    """All parts of a model, in this process."""

    def __init__(self, parts: list[PagedModel]) -> None:
        self._parts = parts

    def run(self, operation: Operation, values: Values) -> Values:
        inputs = values
        for part in self._parts:
            values = part.run(operation, values)
        return rows_of(highest_of(values, inputs))

    def cancel(self, cancelled: bool) -> None:
        for part in self._parts:
            part.cancel(cancelled)

    def close(self) -> None:
        for part in self._parts:
            part.close()


@contextmanager
def context(
    path: Path, n_parts: int, folder: Path, quantization: Quantization = "none"
) -> Iterator[PagedContext]:
    model = Model(path, vocab_only=True)
    parts = []
    for i in range(n_parts):
        target = folder / f"{i}-of-{n_parts}.part"
        target.mkdir()
        convert.main(target, [path], ModelPart(i, n_parts), quantization)
        made = target.with_suffix("") / convert.MODEL
        rows = EmbeddingRows([path]) if ModelPart(i, n_parts).reads_embeddings else None
        parts.append(PagedModel(made, _OPTIONS, rows))
    opened = PagedContext(InTurns(parts), model, _OPTIONS)
    opened.warm_up()
    try:
        yield opened
    finally:
        opened.close()


def answers(context: PagedContext) -> NDArray[np.float32]:
    """Logits of passes of all kinds: a prompt, others beside it, what follows a copy, a cut, a state that
    was restored and a shift; and vectors of texts."""
    rng = np.random.default_rng(3)
    rows: list[NDArray[np.float32]] = []

    def decode(*sequences: tuple[int, int, int]) -> None:
        batch = [
            (int(token), first + i, sequence, i == n - 1)
            for sequence, first, n in sequences
            for i, token in enumerate(rng.integers(5, 500, n))
        ]
        context.decode(batch)
        rows.extend(context.logits(i).copy() for i, row in enumerate(batch) if row[3])

    decode((0, 0, 70))
    decode((0, 70, 1), (1, 0, 40))
    context.copy(0, 2)
    decode((0, 71, 1), (1, 40, 1), (2, 71, 3))
    context.truncate(1, 33)
    state = bytes(context.save(0))
    decode((1, 33, 2), (2, 74, 1))
    context.restore(1, state)
    context.shift(2, [(4, 40)])
    decode((1, 72, 1), (2, 35, 1))
    text = [(int(token), i, i // 20, True) for i, token in enumerate(rng.integers(5, 500, 20))]
    return np.concatenate([*rows, context.embed(text)[-1]])


@pytest.mark.parametrize(
    ("name", "n_parts", "quantization", "least"),
    [
        ("gemma3", 3, "none", 0.99999),
        ("smollm3", 2, "none", 0.99999),
        ("smollm3", 2, "w8a8", 0.9998),  # of activations near a half, a few are rounded otherwise
    ],
)
def test_parts_compute_what_the_whole_model_does(
    name: str, n_parts: int, quantization: Quantization, least: float, tmp_path: Path
) -> None:
    path = MODELS[name].write(tmp_path / "model.gguf")
    with (
        context(path, 1, tmp_path, quantization) as whole,
        context(path, n_parts, tmp_path, quantization) as parts,
    ):
        expected, found = answers(whole), answers(parts)
        assert whole.block_bytes == parts.block_bytes
        assert whole.turns == parts.turns
    assert np.corrcoef(expected, found)[0, 1] > least
    n_vocab = whole.model.n_vocab
    first, second = (a[: 9 * n_vocab].reshape(9, -1).argmax(-1) for a in (expected, found))
    assert (first == second).all()


def test_logits_that_were_left_out_are_computed_when_a_sampler_needs_them(tmp_path: Path) -> None:
    path = MODELS["qwen3-tied"].write(tmp_path / "model.gguf")

    def decode(first: int, *tokens: int) -> None:
        rows = [(token, first + i, slot, True) for slot in (0, 1) for i, token in enumerate(tokens)]
        whole.decode(rows)
        parts.decode(rows)

    with context(path, 1, tmp_path) as whole, context(path, 2, tmp_path) as parts:
        decode(0, 7, 8, 9)
        for row in range(6):
            assert np.isfinite(parts.logits(row, 2)).all(), "nobody knows yet how many are needed"
        decode(3, 10, 11)
        for row, n_highest, n_told in ((0, 2, 2), (1, 1, 2), (2, 2, 2), (3, None, 512)):
            logits, expected = parts.logits(row, n_highest), whole.logits(row)
            assert np.isfinite(logits).sum() == n_told
            highest = np.argsort(-expected)[:n_told]
            assert np.allclose(logits[highest], expected[highest], atol=0.02)
        decode(5, 12)
        assert [np.isfinite(parts.logits(row, 1)).sum() for row in (0, 1)] == [1, 512]
        whole.layers = InTurns([])
        assert np.isfinite(whole.logits(0)).all(), "it has all logits, and computes nothing anew"


def test_parts_keep_their_parts_of_a_state(tmp_path: Path) -> None:
    path = MODELS["qwen3-tied"].write(tmp_path / "model.gguf")
    with context(path, 2, tmp_path) as parts:
        models = parts.layers._parts  # type: ignore[attr-defined]
        parts.decode([(token, i, 0, i == 69) for i, token in enumerate(range(70))])
        plain = parts.save(0)
        parts._keeps_states = True
        kept = parts.save(0)
        assert len(kept) == len(plain)
        assert np.count_nonzero(np.frombuffer(kept, np.uint8)) < 16
        assert bytes(parts.whole(kept)) == bytes(plain)
        for state in (kept, plain):
            parts.truncate(0, 0)
            parts.decode([(token, i, 0, True) for i, token in enumerate(range(100, 133))])
            parts.restore(0, state)
            assert bytes(parts.whole(parts.save(0))) == bytes(plain)
        del kept, state
        parts.save(0)
        assert [len(model._kept) for model in models] == [1, 1], "those that were dropped are gone"
        unknown = np.zeros(len(plain), np.uint8)
        unknown[:16].view(np.int64)[:] = -70, 999
        with pytest.raises(DecodeError, match="not kept here"):
            parts.restore(1, unknown.data)


def test_memory_that_was_used_once_goes_back(tmp_path: Path) -> None:
    path = MODELS["qwen3-tied"].write(tmp_path / "model.gguf")
    with context(path, 2, tmp_path) as parts:
        parts.pretend(0, 256)
        caches = [cache for part in parts.layers._parts for cache in part.caches.values()]  # type: ignore[attr-defined]
        for cache in caches:
            cache[parts._tables.blocks(0)] = 1
        assert all(np.count_nonzero(cache) > 2 * PAGESIZE for cache in caches)
        parts.truncate(0, 0)
        parts.release()
        assert all(np.count_nonzero(cache) < PAGESIZE for cache in caches), "at its ends"
    rows = EmbeddingRows([path])
    assert rows.of(np.arange(100)).any()
    assert resident(path) == 0


def test_a_part_reads_its_own_tensors_and_converts_no_others(tmp_path: Path) -> None:
    path = MODELS["qwen3-tied"].write(tmp_path / "model.gguf")
    whole, *parts = (readable([path], ModelPart(*at)) for at in ((0, 1), (0, 2), (1, 2)))
    assert [*parts[0].layers, *parts[1].layers] == [*whole.layers]
    names = [{tensor.name for tensor in part.tensors} for part in parts]
    assert "token_embd.weight" in names[1] - names[0], "the output's matrix is that of embeddings"
    assert names[0] | names[1] == {tensor.name for tensor in whole.tensors}
    with pytest.raises(ConfigError, match="too few for 5 stages"):
        readable([path], ModelPart(0, 5))
