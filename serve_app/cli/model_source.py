"""What MODEL means on the command line: a file, a Hugging Face repository, or nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from serve_app.errors import ConfigError

_REPOSITORY = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(?::(?P<quant>[\w.-]+))?")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
PREFERRED = ("Q4_K_M", "Q4_0", "Q4_K_S", "Q5_K_M", "Q8_0", "F16", "BF16")
"""Quantisations to take where none is named, the best for CPUs first."""
DEMO = "corral-demo"
"""The id of the built-in model."""


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model of the command line, as the configuration writes it."""

    id: str
    source: dict[str, str | bool]
    """The fields of `serve_app.config.schema.ModelSource`."""


def named(model: str | None) -> NamedModel:
    """The model that the user means. Asks a repository for its files. Raises ConfigError."""
    if model is None:
        return NamedModel(DEMO, {"builtin": True})
    path = Path(model).expanduser()
    if path.is_file():
        return NamedModel(_id_of(path.name), {"path": str(path.resolve())})
    if (model.endswith(".gguf") and model.count("/") != 1) or model.startswith((".", "/", "~")):
        raise ConfigError(f"There is no file {model}.")
    match = _REPOSITORY.fullmatch(model)
    if match is None:
        raise ConfigError(
            f"{model} is neither a GGUF file nor a Hugging Face repository: OWNER/NAME or "
            "OWNER/NAME:QUANT."
        )
    repo_id, quant = match["repo"], match["quant"]
    filename = (
        quant if quant and quant.endswith(".gguf") else chosen(_files(repo_id), repo_id, quant)
    )
    return NamedModel(_id_of(filename), {"repo_id": repo_id, "filename": filename})


def _id_of(filename: str) -> str:
    """A model id made of a file's name."""
    stem = re.sub(r"[^A-Za-z0-9._:-]+", "-", Path(filename).stem).lstrip("._:-")
    return stem[:128] or "model"


def _files(repo_id: str) -> list[str]:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return HfApi().list_repo_files(repo_id)
    except HfHubHTTPError as error:
        raise ConfigError(f"{repo_id}: {str(error).splitlines()[0]}") from None
    except HFValidationError as error:
        raise ConfigError(str(error)) from None
    except Exception as error:  # no network: each version of the library has its own kinds
        raise ConfigError(
            f"Hugging Face cannot be reached to look up the files of {repo_id} ({type(error).__name__}). "
            "Download the model elsewhere, and give its path."
        ) from None


def chosen(files: Sequence[str], repo_id: str, quant: str | None) -> str:
    """The repository's file of that quantisation, or of the first of `PREFERRED` that it has. Raises
    ConfigError that lists what there is."""
    models = sorted(name for name in files if _is_model(name))
    if not models:
        raise ConfigError(f"{repo_id} holds no GGUF file.")
    whole = [name for name in models if not _PART.search(name)]
    wanted = (quant,) if quant else PREFERRED
    for one in wanted:
        if found := next((name for name in whole if _is_of(name, one)), None):
            return found
    split = next((name for name in models if any(_is_of(name, one) for one in wanted)), None)
    if split is not None and split not in whole:
        raise ConfigError(
            f"{split} of {repo_id} is one of several parts, and Corral downloads single files only. "
            "Download all parts, and give the path of the first one."
        )
    if quant is None and len(whole) == 1:
        return whole[0]
    raise ConfigError(f"{repo_id}: choose a file by its quantisation. It has: {', '.join(models)}")


def _is_model(name: str) -> bool:
    base = name.rpartition("/")[2].lower()
    return base.endswith(".gguf") and not base.startswith(("mmproj", "imatrix"))


def _is_of(name: str, quant: str) -> bool:
    return re.search(rf"(^|[-_./]){re.escape(quant)}([-.]|$)", name, re.IGNORECASE) is not None
