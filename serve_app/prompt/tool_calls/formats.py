"""The formats of tool calls, and which of them a chat template asks for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.prompt.tool_calls import hermes, lark, llama3, mistral, qwen_coder
from serve_app.prompt.tool_calls.calls import CallParser, Function


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls."""

    name: str
    signs: tuple[str, ...]
    """Regular expressions that are all found in templates which ask for it."""
    marks: tuple[str, ...]
    """Texts of the format that are tokens of their own in some vocabularies."""
    make_parser: Callable[[Sequence[Function]], CallParser]
    rules: Callable[[Sequence[Function], lark.Mark, bool], str]
    """The rule `calls` in llguidance's Lark, and those that it needs: what is behind the first mark, which
    is one call, or more if the flag is set."""
    opening: str | None = None
    """The mark before a call; None if a call is just the whole answer."""
    message: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    """What its templates take of a message."""

    def parser(self, tools: Sequence[Mapping[str, Any]] = ()) -> CallParser:
        """For an answer to a chat with these tools, as OpenAI describes them."""
        return self.make_parser([tool["function"] for tool in tools])


_QWEN_CODER = ToolFormat(
    "qwen-coder",
    ("<tool_call>", "<function=", "<parameter="),
    qwen_coder.MARKS,
    qwen_coder.QwenCoderParser,
    qwen_coder.rules,
    opening=qwen_coder.OPEN,
)
_MISTRAL_NAMED = ToolFormat(
    "mistral-named",
    (r"\[TOOL_CALLS\]", r"\[ARGS\]"),
    mistral.MARKS,
    lambda _: mistral.MistralParser(),
    mistral.named_rules,
    opening=mistral.OPEN,
    message=mistral.with_short_ids,
)
_MISTRAL_LIST = ToolFormat(
    "mistral-list",
    (r"\[TOOL_CALLS\]",),
    mistral.MARKS,
    lambda _: mistral.MistralParser(),
    mistral.list_rules,
    opening=mistral.OPEN,
    message=mistral.with_short_ids,
)
HERMES = ToolFormat(
    "hermes",
    ("<tool_call>", r'(?:<tool_call>(?:\\n|\s)*\{\\*"name|\{"name": <function-name>,)'),
    hermes.MARKS,
    lambda _: hermes.HermesParser(),
    hermes.rules,
    opening=hermes.OPEN,
)
_LLAMA3 = ToolFormat(
    "llama3",
    (r'\{\\*"name\\*": function name, \\*"parameters\\*":',),
    llama3.MARKS,
    lambda _: llama3.Llama3Parser(),
    llama3.rules,
)
FORMATS = (_QWEN_CODER, _MISTRAL_NAMED, _MISTRAL_LIST, HERMES, _LLAMA3)
"""Those that ask for more are before those that ask for less."""


def detect(template: str) -> ToolFormat | None:
    """The format that a chat template asks for; None if it is none of these."""
    return next(
        (one for one in FORMATS if all(re.search(sign, template) for sign in one.signs)), None
    )
