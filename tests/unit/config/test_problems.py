"""Messages about a configuration have the right name, the line, and what users write instead."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from serve_app.base.errors import ConfigError
from serve_app.base.sampling import PARAMETERS, Api
from serve_app.config import schema
from serve_app.config.problems import describe_errors, models_in
from serve_app.config.removed import REMOVED
from serve_app.config.schema import AppConfig
from serve_app.config.sources import Section
from serve_app.server.access.api_keys import KeyFile

MOST_FIELDS = 100
SAMPLING = {one.name_in(Api.OPENAI) for one in PARAMETERS if Api.OPENAI in one.apis}
FILE = """\
http_options: {host: 127.0.0.1}
applications:
  - name: corral
    args:
      models:
        - id: a
          source:
            builtin: true
          projector:
            pth: x
          engine:
            n_slot: 3  # a comment

            max_wait_s: 3
            n_ctx_slot: one
        - id: b
          source: {builtin: true}
          serve: {num_replica: 2}
      ingress:
        prices:
          gpt-4:
            promt: 3
        whisper: {}
      max_load: 3
"""
TOLD = (
    "10: models.0.projector.pth: there is no such field, did you mean path?",
    "12: models.0.engine.n_slot: there is no such field, did you mean n_slots?",
    "14: models.0.engine.max_wait_s was removed: `max_first_token_s` bounds the wait",
    "15: models.0.engine.n_ctx_slot: Input should be a valid integer",
    "18: models.1.serve.num_replica: Ray Serve has no such option, did you mean num_replicas?",
    "22: ingress.prices.gpt-4.promt: there is no such field, did you mean prompt?",
    "23: ingress.whisper.model: Field required",
    "24: max_load: there is no such field, did you mean max_loaded_models?",
)


def fields(section: type[BaseModel], path: str = "") -> Iterator[tuple[str, str]]:
    """The fields of a section and of those in it: class and name, and the path in a configuration."""
    for name, field in section.model_fields.items():
        if name not in SAMPLING:
            owner = next(one for one in section.__mro__ if name in inspect.get_annotations(one))
            yield f"{owner.__name__}.{name}", f"{path}{name}"
        for inner in models_in(field.annotation):
            if issubclass(inner, Section):
                yield from fields(inner, f"{path}{name}.")


FIELDS = [*fields(AppConfig)]


def test_fields_are_few() -> None:
    """Requests' sampling parameters, which are also fields of `defaults`, do not count."""
    known = {name for name, path in FIELDS if path not in REMOVED}
    assert 80 < len(known) <= MOST_FIELDS


@pytest.mark.parametrize("path", sorted(REMOVED.keys() - {path for _, path in FIELDS}))
def test_a_removed_field_is_refused_with_what_to_write_instead(path: str) -> None:
    *sections, name = path.split(".")
    given: dict[str, Any] = {name: {}}
    for section in reversed(sections):
        given = {section: [given] if section == "models" else given}
    with pytest.raises(ConfigError) as refused:
        schema.parse(given)
    shown = path.replace("models.", "models.0.")
    assert f"{shown} was removed: {REMOVED[path]}" in str(refused.value)


def test_everything_that_is_wrong_in_a_file_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "serve_config.yaml"
    file.write_text(FILE)
    with pytest.raises(ConfigError) as refused:
        schema.load(file)
    message = str(refused.value)
    assert message.startswith("invalid configuration: ")
    told = message.removeprefix("invalid configuration: ").split("; ")
    for one in TOLD:
        assert [text for text in told if text.startswith(f"{file}:{one}")], one
    assert len(told) == len(TOLD) + 1  # a projector may also be `false`


def test_without_a_file_there_are_no_lines() -> None:
    with pytest.raises(ConfigError, match=r"^invalid configuration: models: Field required$"):
        schema.parse({})


def test_keys_get_the_right_name_and_are_not_shown() -> None:
    keys = {"keys": [{"name": "ana", "key": "a-secret-of-ana", "max_prompt_token": 3}]}
    with pytest.raises(ValidationError) as refused:
        KeyFile.model_validate(keys)
    told = describe_errors(refused.value, KeyFile)
    assert (
        "keys.0.max_prompt_token: there is no such field, did you mean max_prompt_tokens?" in told
    )
    assert "keys.0.key: String should have at least 16 characters" in told
    assert "a-secret-of-ana" not in told


def test_what_is_like_nothing_gets_no_other_name() -> None:
    with pytest.raises(ConfigError, match=r"zzz: there is no such field$"):
        schema.parse({"zzz": 1, "models": []})
