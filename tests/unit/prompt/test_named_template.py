"""Chat templates by llama.cpp's names."""

from __future__ import annotations

import pytest

from serve_app.base.errors import InvalidRequestError
from serve_app.kernels.llama import chat_templates
from serve_app.prompt.chat_template import NamedTemplate

TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Ünï"}]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "chatml",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nÜnï<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            "llama3",
            "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nÜnï<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
    ],
)
def test_what_they_write(name: str, text: str) -> None:
    assert NamedTemplate(name).render(TURNS) == text
    ended = NamedTemplate(name).render(TURNS, add_generation_prompt=False)
    assert text.startswith(ended)
    assert ended != text


def test_a_name_that_nobody_knows() -> None:
    assert "no-such" not in chat_templates.names()
    with pytest.raises(InvalidRequestError, match="cannot render"):
        NamedTemplate("no-such").render(TURNS)
