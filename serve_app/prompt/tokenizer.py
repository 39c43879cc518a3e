"""A model's vocabulary and chat template, without its weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.errors import ConfigError, InvalidRequestError
from serve_app.llama.model import Model
from serve_app.prompt.chat_template import ChatTemplate, Message


class Tokenizer:
    """Turns text and chats into prompts. Any thread. Raises ConfigError if the file is no model."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._model = Model(path, vocab_only=True)
        self._bos = self._special(self._model.bos)
        template = self._model.chat_template
        self._template = (
            None
            if template is None
            else ChatTemplate(template, bos=self._bos, eos=self._special(self._model.eos))
        )

    @property
    def calls_tools(self) -> bool:
        """Whether the model's chat template takes tools, and asks for calls in the Hermes format."""
        return self._template is not None and self._template.calls_tools

    @property
    def n_vocab(self) -> int:
        """Token ids are 0 to n_vocab - 1."""
        return self._model.n_vocab

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a plain prompt, with BOS if the model wants it; control tokens written out
        in the text are recognised, as llama-server does."""
        return tuple(self._model.tokenize(text, add_special=True, parse_special=True))

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """The tokens of a chat, up to where the assistant's turn begins. Raises InvalidRequestError
        if the model has no chat template, or its template refuses the messages or knows no tools."""
        if self._template is None:
            raise InvalidRequestError(
                "This model has no chat template: use /v1/completions.", "messages"
            )
        if tools and not self.calls_tools:
            raise InvalidRequestError(
                "This model's chat template has no tools in the Hermes format, the only one that is "
                "understood here.",
                "tools",
            )
        text = self._template.render(messages, tools)
        has_bos = bool(self._bos) and text.startswith(self._bos)
        return tuple(self._model.tokenize(text, add_special=not has_bos, parse_special=True))

    def encode_system_prompt(self, text: str) -> tuple[int, ...]:
        """The tokens that every chat with this system prompt, and without tools, begins with. Raises
        ConfigError if the model has no chat template, or none for system prompts."""
        try:
            one, other = (
                self.encode_chat(
                    [{"role": "system", "content": text}, {"role": "user", "content": said}]
                )
                for said in ("a", "1")
            )
        except InvalidRequestError as error:
            raise ConfigError(f"engine.system_prompts: {error.message}") from error
        pairs = enumerate(zip(one, other, strict=False))
        return one[: next(place for place, (a, b) in pairs if a != b)]

    def _special(self, token: int | None) -> str:
        return "" if token is None else self._model.detokenize([token], special=True)
