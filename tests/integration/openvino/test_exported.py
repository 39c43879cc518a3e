"""Models that OpenVINO's exporter wrote, beside llama.cpp and beside OpenVINO's own inference."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("openvino", reason="corral[openvino] is not installed")
pytest.importorskip("tokenizers", reason="corral[openvino] is not installed")

import openvino
from tokenizers import Tokenizer as Reference

from serve_app.application.resolving import resolve
from serve_app.batch.run import _files_at
from serve_app.config import schema
from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from serve_app.engine.backends.choice import open_backend
from serve_app.engine.backends.llama_cpp import LlamaBackend
from serve_app.engine.backends.openvino import OpenVinoBackend
from serve_app.errors import ConfigError
from serve_app.openvino.exported.files import GRAPH
from serve_app.openvino.exported.header import header_of_graph, hyperparameters_of
from serve_app.prompt.conversation import Turn
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.replica.loaded_model import _prefixes
from serve_app.store.models import n_bytes
from tests.integration.openvino.bf16 import computes_bf16, with_bf16
from tests.integration.openvino.exported_models import as_gguf, changed, unpacked

OPTIONS = EngineOptions(2, 512, 1, n_batch=512, profile_limit_s=0, backend="openvino")
_N_TOKENS, _N_SEEN = 300, 32
_TEXTS = (
    "Hello, world! It's 12345.",
    "  def f(x):\n\treturn x",
    "Grüße, 世界 🙂",
    "<think>a</think>",
)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked("qwen3-fp16", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked("llama-int4", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def gguf_file(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights."""
    return as_gguf(qwen3, tmp_path_factory.mktemp("gguf") / "qwen3.gguf")


def options_for(path: Path) -> EngineOptions:
    return replace(OPTIONS, backend="openvino" if path.name == GRAPH else "llama.cpp")


def text() -> list[int]:
    return [int(token) for token in np.random.default_rng(5).integers(0, 400, _N_TOKENS)]


def last(backend: OpenVinoBackend | LlamaBackend) -> NDArray[np.float32]:
    """The logits of the last tokens of a random text."""
    n = _N_TOKENS - _N_SEEN
    backend.decode([(token, i, 0, i >= n) for i, token in enumerate(text())])
    return np.stack([backend._context.logits(i).copy() for i in range(n, _N_TOKENS)])


def agreement(first: NDArray[np.float32], second: NDArray[np.float32]) -> float:
    """The correlation of the two."""
    return float(np.corrcoef(first.ravel(), second.ravel())[0, 1])


def test_logits_are_those_of_the_same_weights_with_llama_cpp(qwen3: Path, gguf_file: Path) -> None:
    found = last(OpenVinoBackend(qwen3 / GRAPH, OPTIONS))
    expected = last(LlamaBackend(gguf_file, OPTIONS))
    assert agreement(found, expected) > 0.99999
    assert (found.argmax(1) == expected.argmax(1)).all()


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_logits_are_those_of_openvino_without_paged_attention(
    name: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(name)
    settings = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f16"}
    model = openvino.Core().compile_model(folder / GRAPH, "CPU", settings)
    given = {
        "input_ids": np.array([text()], np.int64),
        "attention_mask": np.ones((1, _N_TOKENS), np.int64),
        "position_ids": np.arange(_N_TOKENS, dtype=np.int64)[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    expected = model.create_infer_request().infer(given)["logits"][0, -_N_SEEN:]
    assert agreement(last(OpenVinoBackend(folder / GRAPH, OPTIONS)), expected) > 0.999


@computes_bf16
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_attention_with_bf16_differs_by_rounding(name: str, request: pytest.FixtureRequest) -> None:
    graph: Path = request.getfixturevalue(name) / GRAPH
    narrow, wide = (last(OpenVinoBackend(graph, one)) for one in (with_bf16(OPTIONS), OPTIONS))
    assert 0.999 < agreement(narrow, wide) < 0.999999


def test_shifted_keys_turn_to_their_new_places(qwen3: Path, gguf_file: Path) -> None:
    found = []
    for backend in (OpenVinoBackend(qwen3 / GRAPH, OPTIONS), LlamaBackend(gguf_file, OPTIONS)):
        backend.decode([(token, i, 0, False) for i, token in enumerate(text())])
        backend.shift(0, [(10, 100)])
        backend.decode([(7, _N_TOKENS - 100, 0, True)])
        found.append(backend._context.logits(0).copy())
        backend.close()
    assert agreement(*found) > 0.9999


def test_embeddings_are_llama_cpps(qwen3: Path, gguf_file: Path) -> None:
    vectors = []
    for path in (qwen3 / GRAPH, gguf_file):
        engine = Engine.load(path, replace(options_for(path), embedding_pooling="mean"))
        texts = [tuple(text()[:40]), tuple(text()[40:90])]
        vectors.append(engine.embed(texts, "e").result())
        engine.close()
    assert agreement(*vectors) > 0.9999


async def test_greedy_texts_are_llama_cpps(qwen3: Path, gguf_file: Path) -> None:
    prompt = Tokenizer(header_of_graph(qwen3 / GRAPH)).encode_chat(
        [Turn("user", ("Hello, world!",))]
    )
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    texts = []
    for path in (qwen3 / GRAPH, gguf_file):
        engine = Engine.load(path, options_for(path))
        async with engine.submit(GenerationRequest("one", prompt, params)) as stream:
            texts.append([token async for delta in stream for token in delta.token_ids])
        engine.close()
    assert texts[0] == texts[1]
    assert len(texts[0]) == 24


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_the_header_has_the_tokenizers_tokens(name: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(name)
    model = Tokenizer(header_of_graph(folder / GRAPH)).model
    reference = Reference.from_file(str(folder / "tokenizer.json"))
    for one in _TEXTS:
        ids = reference.encode(one).ids
        assert model.tokenize(one, add_special=True, parse_special=True) == ids
        assert model.detokenize(ids) == one
    assert model.n_vocab == hyperparameters_of(folder).n_vocab > reference.get_vocab_size()
    assert {model.text_of(token) for token in model.eog_tokens} == {"<|im_end|>", "<|endoftext|>"}


def test_the_header_has_template_sizes_and_recommendations(qwen3: Path) -> None:
    path = header_of_graph(qwen3 / GRAPH)
    tokenizer = Tokenizer(path)
    assert tokenizer.chat_template == (qwen3 / "chat_template.jinja").read_text()
    assert tokenizer.recommended == {"temperature": pytest.approx(0.6), "top_k": 20, "top_p": 0.95}
    weights = qwen3 / "openvino_model.bin"
    assert tokenizer.model.file_type == "OpenVINO"
    assert tokenizer.model.n_bytes == weights.stat().st_size < path.stat().st_size
    assert path.stat().st_blocks * 512 < 2**18
    # Matrices have two bytes for each number; norms and the rotary frequencies are left out.
    assert tokenizer.model.n_params == pytest.approx(tokenizer.model.n_bytes / 2, rel=0.01)
    before = path.stat().st_mtime_ns
    assert header_of_graph(qwen3 / GRAPH).stat().st_mtime_ns == before


def test_auto_takes_openvino_and_llama_cpp_is_refused(qwen3: Path) -> None:
    backend = open_backend(qwen3 / GRAPH, replace(OPTIONS, backend="auto"))
    assert (backend.setup.kernels, backend.setup.kernels_reason) == (
        "openvino",
        "the model is in OpenVINO's format",
    )
    backend.close()
    for name in ("llama.cpp", "auto"):
        lacking = replace(OPTIONS, backend=name, kv_unified=True)
        with pytest.raises(
            ConfigError, match=r"llama\.cpp cannot read|does not support engine\.kv"
        ):
            open_backend(qwen3 / GRAPH, lacking)


def test_a_configuration_is_resolved_from_the_folder(qwen3: Path) -> None:
    source = {"path": str(qwen3)}
    model = schema.ModelConfig.model_validate(
        {"id": "tiny", "source": source, "engine": {"backend": "openvino", "threads": 1}}
    )
    (found,) = resolve([model])
    assert found.options.n_ctx_slot == 4096
    for engine, reason in (
        (
            {"backend": "llama.cpp"},
            r"models \(tiny\): llama\.cpp cannot read a model in OpenVINO's format",
        ),
        ({"backend": "openvino", "draft": {"source": source}}, "engine.draft: llama.cpp cannot"),
    ):
        model = schema.ModelConfig.model_validate(
            {"id": "tiny", "source": source, "engine": engine}
        )
        with pytest.raises(ConfigError, match=reason):
            resolve([model])


@pytest.mark.parametrize(
    ("file", "values", "reason"),
    [
        ("config.json", {"model_type": "gemma3_text"}, "the architecture gemma3_text"),
        ("config.json", {"vocab_size": 300}, "more than 300 tokens"),
        ("config.json", {"vocab_size": 512}, "480 logits instead of 512"),
        ("config.json", {"rope_parameters": {"rope_theta": 1e4}}, "rotary frequencies are not"),
        ("generation_config.json", {"eos_token_id": 5}, "not end an answer at its token 5"),
        ("tokenizer.json", {"pre_tokenizer": {"type": "Whitespace"}}, "cuts texts in a way"),
        ("tokenizer.json", {"normalizer": {"type": "Lowercase"}}, "changes texts in a way"),
    ],
)
def test_what_it_cannot_serve_is_refused(
    file: str, values: dict[str, object], reason: str, tmp_path: Path
) -> None:
    folder = unpacked("qwen3-fp16", tmp_path)
    changed(folder, file, **values)
    with pytest.raises(ConfigError, match=reason):
        OpenVinoBackend(folder / GRAPH, OPTIONS)


def test_other_tokens_than_the_tokenizers_are_refused(tmp_path: Path) -> None:
    """llama.cpp takes no spaces into this token, as the tokenizer does."""
    folder = unpacked("llama-int4", tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"][-1] |= {"lstrip": True, "rstrip": True}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"llama\.cpp's tokens of '</think>one</think> two"):
        header_of_graph(folder / GRAPH)


def test_a_header_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = unpacked("qwen3-fp16", tmp_path)
    with caplog.at_level(logging.INFO, "corral.store"):
        paths = {header_of_graph(folder / GRAPH) for _ in range(2)}
        changed(folder, "config.json", max_position_embeddings=1024)
        paths.add(header_of_graph(folder / GRAPH))
    assert len(paths) == 2
    assert caplog.text.count("Wrote the header") == 2
    assert headers_in(tmp_path) == {path.name for path in paths}


def headers_in(folder: Path) -> set[str]:
    """What is kept there, besides locks."""
    kept = (folder / "cache/corral/openvino-headers").iterdir()
    return {path.name for path in kept} - {".locks"}


def test_of_several_that_ask_at_once_one_writes_the_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    graph = unpacked("qwen3-fp16", tmp_path) / GRAPH
    with caplog.at_level(logging.INFO, "corral.store"), ThreadPoolExecutor(4) as pool:
        paths = {*pool.map(header_of_graph, [graph] * 4)}
    assert headers_in(tmp_path) == {path.name for path in paths}
    assert caplog.text.count("Wrote the header") == len(paths) == 1


def test_a_killed_process_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    graph = unpacked("qwen3-fp16", tmp_path) / GRAPH
    code = (
        "import os, sys, pathlib; from serve_app.openvino.exported import header\n"
        "header.check_tokens = lambda *_, **__: os.kill(os.getpid(), 9)\n"
        "header.header_of_graph(pathlib.Path(sys.argv[1]))"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(graph)], check=False)
    assert killed.returncode == -9
    (left,) = headers_in(tmp_path)
    assert left.endswith(".part")
    path = header_of_graph(graph)
    assert headers_in(tmp_path) == {path.name}


def test_the_header_is_the_same_wherever_the_model_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas of several nodes tell by it whether their states are alike."""
    contents = []
    for name in ("one", "two"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name / "cache"))
        folder = unpacked("qwen3-fp16", tmp_path / name).rename(tmp_path / name / name)
        (folder / "merges.txt").write_text(name)
        contents.append(header_of_graph(folder / GRAPH).read_bytes())
    assert contents[0] == contents[1]


def test_other_weights_of_the_same_size_are_another_model(tmp_path: Path) -> None:
    folder = unpacked("qwen3-fp16", tmp_path)
    keys = []
    for _ in range(2):
        backend = OpenVinoBackend(folder / GRAPH, OPTIONS)
        keys.append(backend.states.key)
        backend.close()
        weights = folder / "openvino_model.bin"
        content = bytearray(weights.read_bytes())
        content[len(content) // 2] ^= 1
        weights.write_bytes(content)
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("config.json", "{", r"its config\.json is not JSON"),
        ("config.json", "[]", r"its config\.json is not an object"),
        ("tokenizer_config.json", "{", r"its tokenizer_config\.json is not JSON"),
        ("tokenizer_config.json", "[]", r"its tokenizer_config\.json is not an object"),
        ("tokenizer.json", "{}", "its tokenizer is of the kind None"),
        ("generation_config.json", '{"top_p": "1"}', "one of its files is not as an exporter"),
        ("generation_config.json", '{"eos_token_id": [99999]}', "at its token 99999"),
        (GRAPH, "<net", "cannot read"),
        ("openvino_model.bin", "", "cannot read"),
    ],
)
def test_damaged_files_are_refused(file: str, content: str, reason: str, tmp_path: Path) -> None:
    folder = unpacked("qwen3-fp16", tmp_path)
    (folder / file).write_text(content)
    with pytest.raises(ConfigError, match=reason):
        OpenVinoBackend(folder / GRAPH, OPTIONS)


def test_a_model_without_weights_and_a_cache_without_room_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = unpacked("qwen3-fp16", tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"The header of the model in .* cannot be made in "):
        header_of_graph(folder / GRAPH)
    (folder / "openvino_model.bin").unlink()
    with pytest.raises(ConfigError, match="has no weights"):
        header_of_graph(folder / GRAPH)


def test_truncation_and_padding_are_not_meant_for_prompts(tmp_path: Path) -> None:
    folder = unpacked("qwen3-fp16", tmp_path)
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    changed(folder, "tokenizer.json", truncation=truncation)
    assert header_of_graph(folder / GRAPH).is_file()


def test_a_replica_pins_system_prompts_and_counts_the_weights(qwen3: Path) -> None:
    (prefix,) = _prefixes(qwen3 / GRAPH, ["Be brief."], None)
    tokenizer = Tokenizer(header_of_graph(qwen3 / GRAPH))
    assert prefix == tokenizer.encode_system_prompt("Be brief.")
    assert n_bytes(qwen3 / GRAPH) > (qwen3 / "openvino_model.bin").stat().st_size


def test_a_batch_begins_anew_when_the_weights_change(tmp_path: Path) -> None:
    folder = unpacked("qwen3-fp16", tmp_path)
    for path in (folder, folder / GRAPH):
        assert str(folder / "openvino_model.bin") in _files_at(path)
    assert _files_at(tmp_path / "a.gguf") == [str(tmp_path / "a.gguf")]


def test_the_path_of_the_graph_means_the_folder(qwen3: Path) -> None:
    source = {"path": str(qwen3 / GRAPH)}
    model = schema.ModelConfig.model_validate(
        {"id": "tiny", "source": source, "engine": {"backend": "llama.cpp"}}
    )
    with pytest.raises(ConfigError, match=r"llama\.cpp cannot read a model in OpenVINO's format"):
        resolve([model])
    for more, reason in (
        ({"projector": source}, "projector: llama.cpp cannot read OpenVINO's format"),
        ({"adapters": [{"id": "a", "source": source}]}, r"adapters \(a\): llama.cpp cannot read"),
    ):
        model = schema.ModelConfig.model_validate(
            {"id": "tiny", "source": {"builtin": True}, **more}
        )
        with pytest.raises(ConfigError, match=reason):
            resolve([model])
