"""The model's own chat template: Jinja, rendered in a sandbox as Hugging Face's `transformers` does.

Source of the environment (trim_blocks, lstrip_blocks, loop controls, `raise_exception`,
`strftime_now`, `tojson`): the chat templating chapter of the transformers documentation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from serve_app.errors import ConfigError, InvalidRequestError
from serve_app.prompt import output_parser, tool_calls

Message = Mapping[str, Any]
"""`role`, `content` and whatever else the template reads."""


class ChatTemplate:
    """A compiled template. Any thread. Raises ConfigError if it is no valid Jinja."""

    def __init__(self, source: str, *, bos: str, eos: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            bos_token=bos,
            eos_token=eos,
        )
        try:
            self._template = environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"The model's chat template is not valid: {error}") from error
        self.tool_format = tool_calls.detect(source) if "tools" in names else None
        """How it asks for calls; None if it takes no tools, or asks in a way that is not understood."""
        self.thinks = output_parser.REASONING_OPEN in source
        """Whether its model may think before it answers."""
        self._reserved = {"messages", "tools", "add_generation_prompt", *environment.globals}

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt that asks for the assistant's next turn; the conversation alone if
        `add_generation_prompt` is false. `tools` are functions as OpenAI describes them; `extra` are more
        variables for the template.

        Raises InvalidRequestError, in the template's own words, for messages that it does not take.
        """
        extra = extra or {}
        for name in sorted(self._reserved & extra.keys()):
            raise InvalidRequestError(
                f"chat_template_kwargs: {name!r} is not yours to set.", "chat_template_kwargs"
            )
        if self.tool_format is not None:
            messages = [self.tool_format.message(message) for message in messages]
        try:
            return self._template.render(
                extra,
                messages=messages,
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template may do anything with what it is given
            raise InvalidRequestError(
                f"The model's chat template refuses these messages: {error}", "messages"
            ) from error


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
