"""Modelfiles, and what they change of a model's entry in the configuration."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from serve_app.apis.ollama import preparation
from serve_app.apis.ollama.modelfile import fields_of
from serve_app.base.errors import InvalidRequestError
from tests.doubles.api import prepared

MODELFILE = '''
# A comment, and an empty line

FROM owner/name:Q8_0
PARAMETER temperature 0.5
parameter num_ctx 4096
PARAMETER stop "<|end|>"
PARAMETER stop Observation:
SYSTEM """You are Mario.
# no comment
FROM the Mushroom Kingdom."""
TEMPLATE "{{ messages }}"
ADAPTER owner/lora:F16
LICENSE MIT'''


def test_a_modelfile_has_the_fields_of_a_request() -> None:
    assert fields_of(MODELFILE) == {
        "from": "owner/name:Q8_0",
        "parameters": {"temperature": 0.5, "num_ctx": 4096, "stop": ["<|end|>", "Observation:"]},
        "system": "You are Mario.\n# no comment\nFROM the Mushroom Kingdom.",
        "template": "{{ messages }}",
        "adapters": {"adapter-1": "owner/lora:F16"},
        "license": "MIT",
    }


@pytest.mark.parametrize("text", ["FROM", "RUN rm", "what is this", 'FROM a\n"""'])
def test_what_is_no_modelfile_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        fields_of(text)


def created(**fields: Any) -> preparation.ModelChange:
    return prepared(preparation.create, {}, orjson.dumps({"model": "mario"} | fields))


def test_a_modelfile_changes_the_same_as_the_fields_of_a_request() -> None:
    by_file = created(modelfile=MODELFILE)
    assert by_file == created(**fields_of(MODELFILE))
    assert (by_file.name, by_file.origin, by_file.in_lines) == ("mario", "owner/name:Q8_0", True)
    assert by_file.sections == {
        "defaults": {
            "temperature": 0.5,
            "stop": ["<|end|>", "Observation:"],
            "system_prompt": "You are Mario.\n# no comment\nFROM the Mushroom Kingdom.",
            "chat_template": "{{ messages }}",
            "adapters": ["adapter-1"],
        },
        "engine": {"n_ctx_slot": 4096},
        "adapters": [{"id": "adapter-1", "source": {"repo": "owner/lora:F16"}}],
    }


def test_numbers_that_mean_nothing_are_no_defaults() -> None:
    parameters = {"seed": -1, "num_predict": -1, "num_gpu": 3, "num_keep": 5}
    change = created(**{"from": "a"}, parameters=parameters, stream=False)
    assert change.sections == {"engine": {"n_keep": 5}}
    assert not change.in_lines


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "from"),
        ({"from": "a", "files": {"m.gguf": "sha256:0"}}, "files"),
        ({"from": "a", "messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"from": "a", "quantize": "q4_K_M"}, "quantize"),
        ({"from": "a", "model": ""}, "Name a model"),
        ({"from": "a", "parameters": {"temperature": "hot"}}, "temperature"),
    ],
)
def test_what_cannot_be_done_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        created(**fields)
