"""Names of models, and the files that they mean."""

from __future__ import annotations

import pytest

from serve_app.base.errors import ConfigError
from serve_app.config import model_names as names
from serve_app.config.model_names import HubName, choose_files, parts_of, projector

FILES = (
    "README.md",
    "Qwen3-4B-Q4_K_M.gguf",
    "Qwen3-4B-Q8_0.gguf",
    "Qwen3-4B-IQ4_XS.gguf",
    "mmproj-Qwen3-4B-Q8_0.gguf",
    "BF16/Qwen3-4B-BF16-00001-of-00002.gguf",
    "BF16/Qwen3-4B-BF16-00002-of-00002.gguf",
    "Qwen3-4B-Q6_K-00001-of-00002.gguf",
)
REPO = "Qwen/Qwen3-4B-GGUF"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (REPO, HubName(REPO)),
        (f"{REPO}:Q4_K_M", HubName(REPO, "Q4_K_M")),
        (f"{REPO}:Q4_K_M@v1.0", HubName(REPO, "Q4_K_M", "v1.0")),
        (f"{REPO}@refs/pr/3:Q4_K_M", HubName(REPO, "Q4_K_M", "refs/pr/3")),
        (f"hf.co/{REPO}:latest", HubName(REPO)),
        (f"https://huggingface.co/{REPO}/", HubName(REPO)),
        (f"{REPO}:BF16/a-b.gguf", HubName(REPO, "BF16/a-b.gguf")),
    ],
)
def test_a_name_is_read(text: str, name: HubName) -> None:
    assert names.parse_hub_name(text) == name
    assert names.parse_hub_name(str(name)) == name


@pytest.mark.parametrize("text", ["qwen", "a/b/c", f"{REPO}@a:Q4_0@b", "a/b:", "a b/c", "/a/b"])
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not the name of a Hugging Face repository"):
        names.parse_hub_name(text)


@pytest.mark.parametrize(
    ("choice", "files"),
    [
        (None, FILES[1:2]),
        ("q8_0", FILES[2:3]),
        ("IQ4_XS", FILES[3:4]),
        ("BF16", FILES[5:7]),
        ("Qwen3-4B-Q8_0.gguf", FILES[2:3]),
        ("BF16/Qwen3-4B-BF16-00001-of-00002.gguf", FILES[5:7]),
    ],
)
def test_a_choice_means_all_files_of_a_model(choice: str | None, files: tuple[str, ...]) -> None:
    assert choose_files(FILES, HubName(REPO, choice)) == files


def test_the_only_file_needs_no_choice() -> None:
    assert choose_files(["x/odd-name.gguf", "mmproj-x.gguf"], HubName("a/b")) == (
        "x/odd-name.gguf",
    )


EYES = ("mmproj-F32.gguf", "mmproj-model-f16.gguf", "big/mmproj-F16.gguf", "big/a-Q4_0.gguf")


@pytest.mark.parametrize(
    ("files", "choice", "beside", "found"),
    [
        (EYES, None, "a-Q4_0.gguf", "mmproj-model-f16.gguf"),
        (EYES, None, "big/a-Q4_0.gguf", "big/mmproj-F16.gguf"),
        (EYES, "F32", None, "mmproj-F32.gguf"),
        (EYES, "mmproj-F32.gguf", "big/a-Q4_0.gguf", "mmproj-F32.gguf"),
        (("a.mmproj-Q8_0.gguf", "a-Q8_0.gguf"), None, "a-Q8_0.gguf", "a.mmproj-Q8_0.gguf"),
        (("mmproj.gguf", "a-Q8_0.gguf"), None, "sub/a.gguf", "mmproj.gguf"),
        (FILES[1:3], None, None, None),
    ],
)
def test_a_projector_is_found(
    files: tuple[str, ...], choice: str | None, beside: str | None, found: str | None
) -> None:
    assert projector(files, HubName("a/b", choice), beside) == found
    if found is not None:
        assert parts_of(files, HubName("a/b", found)) == (found,)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("Q8_0", "no file of Q8_0. .* It has: mmproj-x.gguf, mmproj-y.gguf$"),
        (None, "choose a projector. It has: mmproj-x.gguf, mmproj-y.gguf$"),
        ("mmproj-z.gguf", "has no model mmproj-z.gguf"),
    ],
)
def test_a_projector_that_is_not_there_is_refused(choice: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        projector(["mmproj-x.gguf", "mmproj-y.gguf", "a-Q8_0.gguf"], HubName("a/b", choice))


@pytest.mark.parametrize(
    ("files", "choice", "message"),
    [
        (FILES, "Q5_K_M", "no file of Q5_K_M. .* It has: BF16/.*, Qwen3-4B-Q8_0.gguf$"),
        (FILES, "Q4_K", "no file of Q4_K. Choose"),
        (FILES, "other.gguf", "has no model other.gguf. It has: "),
        (FILES, "mmproj-Qwen3-4B-Q8_0.gguf", "has no model mmproj"),
        (FILES, "Q6_K", "lacks Qwen3-4B-Q6_K-00002-of-00002.gguf, which belongs to"),
        (FILES, FILES[6], "Name the first one, BF16/Qwen3-4B-BF16-00001-of-00002.gguf"),
        (("README.md", "mmproj-a.gguf"), None, "a/b holds no GGUF model"),
        (("openvino_model.xml", "openvino_model.bin"), None, "a/b holds no GGUF model"),
        (("a-Q2_K.gguf", "a-Q3_K_S.gguf"), None, "It has: a-Q2_K.gguf, a-Q3_K_S.gguf$"),
        (("a-Q4_0.gguf", "b-Q4_0.gguf"), "Q4_0", "Name a file, such as a/b:a-Q4_0.gguf. It has: "),
    ],
)
def test_what_a_repository_has_not_is_refused(
    files: tuple[str, ...], choice: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_files(files, HubName("a/b", choice))
