"""What a user names, and the configuration that it becomes."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.base.errors import ConfigError
from serve_app.cli.config_file import NamedModel, ServeOptions, document, named_model
from serve_app.store import hub

FILES = (
    "README.md",
    "Qwen3-4B-Q4_K_M.gguf",
    "Qwen3-4B-Q8_0.gguf",
    "Qwen3-4B-IQ4_XS.gguf",
    "mmproj-Qwen3-4B-Q8_0.gguf",
    "Qwen3-4B-BF16-00001-of-00002.gguf",
    "Qwen3-4B-BF16-00002-of-00002.gguf",
)

LISTING = {"commit": "c" * 40, "files": [{"path": path} for path in FILES]}


def test_nothing_is_the_built_in_model() -> None:
    assert named_model(None) == NamedModel("corral-demo", {"builtin": True})


def test_a_file_is_served_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "my model (v2).Q4_0.gguf"
    path.touch()
    monkeypatch.chdir(tmp_path)
    assert named_model(path.name) == NamedModel("my-model-v2-.Q4_0", {"path": str(path)})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nothing.gguf", "There is no file nothing.gguf."),
        ("./nothing", "There is no file ./nothing."),
        ("models/nothing.gguf", "There is no file models/nothing.gguf."),
        ("/a/b/c.gguf", "There is no file /a/b/c.gguf."),
        ("qwen", "qwen is neither a GGUF file nor a Hugging Face repository"),
        ("a/b/c", "a/b/c is neither"),
    ],
)
def test_what_is_no_model_is_refused(model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        named_model(model)


@pytest.mark.parametrize(
    ("model", "filename"),
    [
        ("Qwen/Qwen3-4B-GGUF", "Qwen3-4B-Q4_K_M.gguf"),
        ("Qwen/Qwen3-4B-GGUF:q8_0", "Qwen3-4B-Q8_0.gguf"),
        ("hf.co/Qwen/Qwen3-4B-GGUF:IQ4_XS", "Qwen3-4B-IQ4_XS.gguf"),
        ("https://huggingface.co/Qwen/Qwen3-4B-GGUF", "Qwen3-4B-Q4_K_M.gguf"),
        ("Qwen/Qwen3-4B-GGUF:some-other.gguf", "some-other.gguf"),
    ],
)
def test_a_repository_is_asked_for_its_files(
    model: str, filename: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_listing", lambda *_: LISTING)
    found = named_model(model)
    assert found.source == {"repo": f"Qwen/Qwen3-4B-GGUF:{filename}"}
    assert found.id == filename.removesuffix(".gguf")


def test_a_revision_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_listing", lambda *_: LISTING)
    found = named_model("Qwen/Qwen3-4B-GGUF:BF16@v2")
    assert found == NamedModel(
        "Qwen3-4B-BF16", {"repo": "Qwen/Qwen3-4B-GGUF:Qwen3-4B-BF16-00001-of-00002.gguf@v2"}
    )


def test_a_url_is_a_source() -> None:
    url = "s3://bucket/models/tiny-00001-of-00003.gguf"
    assert named_model(url) == NamedModel("tiny", {"url": url})


def test_models_in_openvinos_exported_format_are_refused(tmp_path: Path) -> None:
    graph = tmp_path / "openvino_model.xml"
    graph.touch()
    for path in (tmp_path, graph):
        with pytest.raises(ConfigError, match=r"is no GGUF file, .* name a GGUF file of the model"):
            named_model(str(path))


def test_models_that_may_change_are_loaded_on_demand() -> None:
    args = document(ServeOptions(manage_models=True))["applications"][0]["args"]
    assert args["manage_models"]
    assert [model["keep_alive"] for model in args["models"]] == ["5m"]
