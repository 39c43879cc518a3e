"""LoRA adapters on one engine, with a real tiny model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.base.engine_options import AdapterFile
from serve_app.base.errors import ConfigError, InvalidRequestError
from serve_app.base.values.adapters import Adapters, AdapterUse
from serve_app.base.values.answers import Accepted, SequenceEnd
from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams, TokenDelta
from serve_app.kernels.llama.context import Adapter
from serve_app.kernels.llama.model import Model
from tools.random_models.adapter import write_random_adapter
from tools.random_models.model import SHAPES, write_random_gguf

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
    """Not quantised. llama.cpp multiplies with adapters in another order if a batch has other rows, which
    changes the last bits of a sum. What is quantised next makes that a thousand times as much."""
    path = tmp_path_factory.mktemp("model") / "plain.gguf"
    write_random_gguf(path, SHAPES["tiny"], "f32")
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
    for outcome in engine.submit_to(list(zip(requests, readers, strict=True))):
        assert isinstance(outcome, Accepted)
    return [reader.wait() for reader in readers]


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
        engine, *(asked(engine, f"together-{i}", *pair, f"new-{i}") for i, pair in enumerate(pairs))
    )
    assert [one.text for one in together] == alone
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


def test_an_adapter_comes_and_goes(engine: Engine, adapter_files: list[AdapterFile]) -> None:
    """What was computed with another file of its name is of no use."""
    text = PROMPT * 4
    expected = told(engine, asked(engine, "as-b", SETS[2], text))[0].text
    for name, version, file in (("x", "1", 0), ("x", "2", 1), ("y", "1", 1)):
        use = AdapterUse(name, 1.0, version)
        engine.adapters.load(use.key, adapter_files[file].path)
        reader = told(engine, asked(engine, use.key, (use,), text, "mine"))[0]
        assert reader.n_cached == 0
        assert (reader.text == expected) is (file == 1)
        engine.adapters.hide(use.key)
        (refusal,) = engine.submit_to([(asked(engine, "hidden", (use,)), Reader())])
        assert isinstance(refusal, InvalidRequestError)
        assert engine.adapters.free(use.key)
    assert told(engine, asked(engine, "as-b-again", SETS[2], text))[0].text == expected


def test_a_bad_file_that_comes_later_changes_nothing(engine: Engine, model_path: Path) -> None:
    expected = told(engine, asked(engine, "before", SETS[1]))[0].text
    with pytest.raises(ConfigError, match="cannot load the adapter"):
        engine.adapters.load("bad@1", model_path)
    assert told(engine, asked(engine, "after", SETS[1]))[0].text == expected


def test_adapters_are_loaded_while_streams_run(
    engine: Engine, adapter_files: list[AdapterFile]
) -> None:
    alone = [told(engine, asked(engine, f"calm-{i}", used))[0].text for i, used in enumerate(SETS)]
    readers = [Reader() for _ in SETS]
    requests = [asked(engine, f"busy-{i}", used) for i, used in enumerate(SETS)]
    for outcome in engine.submit_to(list(zip(requests, readers, strict=True))):
        assert isinstance(outcome, Accepted)
    for number in range(20):
        engine.adapters.load(f"more@{number}", adapter_files[0].path)
        engine.adapters.hide(f"more@{number}")
        assert engine.adapters.free(f"more@{number}")
    assert [one.wait().text for one in readers] == alone


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
