"""LoRA adapters on one engine, with a real tiny model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.demo_model.random_adapter import write_random_adapter
from serve_app.demo_model.random_gguf import SHAPES, write_random_gguf
from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams, TokenDelta
from serve_app.engine.options import AdapterFile
from serve_app.errors import ConfigError, InvalidRequestError
from serve_app.llama.context import Adapter
from serve_app.llama.model import Model
from serve_app.types import Adapters, AdapterUse, SequenceEnd

PROMPT = "the people of this long water say "
SETS: list[Adapters] = [(), *((AdapterUse(name, 1.0),) for name in "abc")]


class Reader:
    """Collects one request's deltas."""

    def __init__(self) -> None:
        self.text = ""
        self.end: SequenceEnd | None = None
        self._ended = threading.Event()

    def __call__(self, delta: TokenDelta) -> None:
        self.text += delta.text
        self.end = delta.end
        if delta.end is not None:
            self._ended.set()

    def wait(self) -> Reader:
        assert self._ended.wait(60)
        assert self.end is not None
        assert self.end.error is None
        return self

    @property
    def n_cached(self) -> int:
        assert self.end is not None
        return self.end.usage.cached_tokens


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its logits do not depend on what else is in a batch."""
    path = tmp_path_factory.mktemp("model") / "exact.gguf"
    write_random_gguf(path, SHAPES["tiny"], "q8_0")
    return path


@pytest.fixture(scope="module")
def adapter_files(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterFile]:
    folder = tmp_path_factory.mktemp("adapters")
    files = [AdapterFile(name, folder / f"{name}.gguf") for name in "abc"]
    for seed, one in enumerate(files):
        write_random_adapter(model_path, one.path, rank=4, seed=seed)
    return files


@pytest.fixture(scope="module", params=[False, True], ids=["split", "unified"])
def engine(
    request: pytest.FixtureRequest, model_path: Path, adapter_files: list[AdapterFile]
) -> Iterator[Engine]:
    options = EngineOptions(
        n_slots=16,
        n_ctx_slot=256,
        threads=1,
        kv_unified=request.param,
        flash_attn=False,
        adapters=tuple(adapter_files),
        cache_ram_bytes=2**24,
        profile_limit_s=0,
    )
    found = Engine.load(model_path, options)
    yield found
    found.close()


def asked(
    engine: Engine, name: str, adapters: Adapters, text: str = PROMPT, group: str = ""
) -> GenerationRequest:
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompt = engine.tokenize(text)
    return GenerationRequest(name, prompt, sampling, cache_group=group, adapters=adapters)


def told(engine: Engine, *requests: GenerationRequest) -> list[Reader]:
    """What they say when they come together."""
    readers = [Reader() for _ in requests]
    assert not any(engine.submit_to(list(zip(requests, readers, strict=True))))
    return [reader.wait() for reader in readers]


def n_common_chars(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def test_each_adapter_writes_a_text_of_its_own(engine: Engine) -> None:
    half, both = (AdapterUse("a", 0.5),), (AdapterUse("a", 1.0), AdapterUse("b", 1.0))
    sets = [*SETS, half, both]
    found = [told(engine, asked(engine, f"own-{i}", used))[0] for i, used in enumerate(sets)]
    assert len({one.text for one in found}) == len(sets)


def test_sixteen_streams_are_what_each_is_alone(engine: Engine) -> None:
    pairs = [(used, f"{PROMPT}{number} and then ") for number in range(4) for used in SETS]
    alone = [
        told(engine, asked(engine, f"alone-{i}", *pair, f"{i}"))[0].text
        for i, pair in enumerate(pairs)
    ]
    together = told(
        engine,
        *(asked(engine, f"together-{i}", *pair, f"new-{i}") for i, pair in enumerate(pairs)),
    )
    same = [one.text == text for one, text in zip(together, alone, strict=True)]
    assert sum(same) >= 13, same  # sums of float32 are rounded otherwise in larger batches
    for i, one in enumerate(together):  # and those that differ are their own adapter's still
        first = 4 * (i // 4)
        n_common = [n_common_chars(one.text, text) for text in alone[first : first + 4]]
        assert n_common.index(max(n_common)) == i - first
    assert {one.n_cached for one in together} == {0}


def test_what_one_adapter_computed_is_no_start_for_another(engine: Engine) -> None:
    text = PROMPT * 4
    used = [SETS[1], SETS[2], (), SETS[1]]
    found = [
        told(engine, asked(engine, f"cache-{i}", one, text, "cache"))[0]
        for i, one in enumerate(used)
    ]
    n_prompt = len(engine.tokenize(text))
    assert [one.n_cached for one in found] == [0, 0, 0, n_prompt - 1]
    assert found[0].text == found[3].text


def test_an_unknown_adapter_is_refused(engine: Engine) -> None:
    unknown = asked(engine, "unknown", (AdapterUse("z", 1.0),))
    (refusal,) = engine.submit_to([(unknown, Reader())])
    assert isinstance(refusal, InvalidRequestError)
    assert "no adapter 'z'" in str(refusal)


def test_files_that_do_not_fit_are_refused(
    model_path: Path, adapter_files: list[AdapterFile], tmp_path: Path
) -> None:
    model = Model(model_path)
    wrong = tmp_path / "wrong.gguf"
    with pytest.raises(ConfigError, match="no adapter file"):
        Adapter(model, wrong)
    write_random_adapter(model_path, wrong, rank=4, architecture="llama")
    with pytest.raises(ConfigError, match="cannot load the adapter"):
        Adapter(model, wrong)
    write_random_adapter(model_path, wrong, rank=4, shrink=32)
    with pytest.raises(ConfigError, match="cannot load the adapter"):
        Adapter(model, wrong)
    wrong.write_bytes(adapter_files[0].path.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="cannot load the adapter"):
        Adapter(model, wrong)
    with pytest.raises(ConfigError, match="cannot load the adapter"):
        Adapter(model, model_path)


def test_a_model_without_matrices_has_no_adapters(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "empty.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="no attention"):
        write_random_adapter(tmp_path / "empty.gguf", tmp_path / "out.gguf")
