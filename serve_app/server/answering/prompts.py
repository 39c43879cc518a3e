"""Prompts as llama-server's clients send them: texts, token ids, both side by side, and media between them.

Source: llama.cpp, tools/server/README.md.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from serve_app.base.errors import InvalidRequestError
from serve_app.base.values.media import Medium
from serve_app.server.answering.messages import ChatMessage
from serve_app.server.answering.preparation import (
    check_medium,
    refuse_unknown_tokens,
    tokenize_checked,
    with_media,
)
from serve_app.server.answering.requests import Text, TokenId
from serve_app.server.http.request_model import RequestModel
from serve_app.server.model_registry import ModelInfo

MEDIA_MARKER = "<__media__>"
"""Stands for a picture in a prompt."""

Mixed = list[TokenId | str]
"""Token ids and texts, side by side."""


class MediaPrompt(RequestModel):
    """A prompt with pictures and sounds."""

    prompt_string: Text
    """`<__media__>` stands for the next one."""
    multimodal_data: Annotated[list[str], Field(min_length=1)]
    """Files in base64, or their URLs."""

    @model_validator(mode="after")
    def _check_markers(self) -> MediaPrompt:
        n_markers, n_media = self.prompt_string.count(MEDIA_MARKER), len(self.multimodal_data)
        if n_markers != n_media:
            raise InvalidRequestError(
                f"The prompt has {n_markers} markers {MEDIA_MARKER} for {n_media} pictures and sounds.",
                "prompt",
            )
        return self

    @property
    def urls(self) -> list[str]:
        return [
            data if data.startswith(("data:", "http:", "https:")) else f"data:;base64,{data}"
            for data in self.multimodal_data
        ]


Prompt = str | MediaPrompt | list[Mixed | str | TokenId | MediaPrompt]
"""A text, token ids and texts mixed, or a prompt with pictures; or several of them."""


def several(prompt: Prompt) -> list[str | Mixed | MediaPrompt]:
    """The prompts, one or several: a list of texts only, or with a list in it, is of several."""
    if not isinstance(prompt, list):
        return [prompt]
    mixed = [part for part in prompt if isinstance(part, int | str)]
    if len(mixed) == len(prompt) and any(isinstance(part, int) for part in mixed):
        return [mixed]
    return [[part] if isinstance(part, int) else part for part in prompt]


def plain(prompt: object) -> object:
    """The prompt with texts where llama-server's clients may send objects, as `{"prompt_string": "Hello"}`
    and `{"content": [{"type": "text", "text": "Hello"}]}`. Objects with media are MediaPrompts."""
    if isinstance(prompt, list):
        return [one if isinstance(one, int | str) else plain(one) for one in prompt]
    if not isinstance(prompt, dict) or prompt.get("multimodal_data"):
        return prompt
    if not isinstance(content := prompt.get("content"), list):
        return prompt.get("prompt_string", prompt)
    parts = ChatMessage(role="user", content=content).as_turn().parts
    text = "".join(part if isinstance(part, str) else MEDIA_MARKER for part in parts)
    urls = [part.url for part in parts if not isinstance(part, str)]
    return {"prompt_string": text, "multimodal_data": urls} if urls else text


def media_prompt(
    model: ModelInfo, prompt: MediaPrompt, field: str
) -> tuple[tuple[int, ...], tuple[Medium, ...]]:
    """The prompt's tokens, with those that the model wants around a text, and MEDIUM for each of its media.
    Raises InvalidRequestError, and MediaError like `check_medium`."""
    check_medium(model, model.hears, field)
    encode, first = model.tokenizer.tokenize, model.tokenizer.model.first_tokens
    tokens = list(first)
    for i, text in enumerate(prompt.prompt_string.split(MEDIA_MARKER)):
        tokens += [-i] if i else []
        tokens += tokenize_checked(model, field, len(text), encode, text, False, True)
    tokens += encode("", True, True)[len(first) :]
    return with_media(model, tuple(tokens), prompt.urls, field)


def mixed_tokens(model: ModelInfo, prompt: str | list[int | str], field: str) -> tuple[int, ...]:
    """Texts among token ids are tokenized where they stand; only one at the beginning gets a BOS."""
    parts: list[int | str] = [prompt] if isinstance(prompt, str) else prompt
    refuse_unknown_tokens(model, field, [part for part in parts if isinstance(part, int)])
    encode = model.tokenizer.tokenize
    tokens: list[int] = []
    for i, part in enumerate(parts):
        if isinstance(part, int):
            tokens.append(part)
        else:
            tokens += tokenize_checked(model, "prompt", len(part), encode, part, i == 0, True)
    return tuple(tokens)
