"""Formats whose calls have JSON arguments between a model's own delimiters.

Sources: the chat templates of the models that each format names; Meta's "JSON based tool calling" for
Llama; the tokenizers of Mistral AI's `mistral-common`, versions 3 to 13; the Hermes Function Calling
repository of Nous Research; Moonshot AI's "tool call guidance" for Kimi.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

from serve_app.prompt.template_text import TemplateText
from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import Function, ToolCall
from serve_app.prompt.tool_calls.format import ToolFormat
from serve_app.prompt.tool_calls.formats.markup import (
    WORD,
    JsonObject,
    Markup,
    MarkupParser,
    Tagged,
    of_markup,
)
from serve_app.prompt.tool_calls.parser import CallParser, Part, Previous
from serve_app.prompt.tool_calls.reader import BLANKS, Reading, TextReader

_NAME, _WORD = re.compile(r"[\w.-]*"), re.compile(r"\w*")


_GRANITE_OPEN = "<|tool_call|>"


def _granite_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with calls as the model wrote them: the template writes contents only."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = json.dumps([call["function"] for call in calls], ensure_ascii=False)
    # The opening is the template's word.
    content = message["content"] + TemplateText.own(_GRANITE_OPEN) + written
    return {**message, "content": content}


# -- Llama 3.1, 3.2 and 3.3 ---------------------------------------------------------------------------

PYTHON_TAG = "<|python_tag|>"
_KEYS = ('{"name":', '{"type":', '{"parameters":')
_BETWEEN = re.compile(r"\s*;?\s*")


class Llama3Parser(CallParser):
    """The whole answer is an object with `name` and `parameters`, or several with `;` or blanks between
    them. It stands at the beginning of an answer, behind another call, or behind `<|python_tag|>`."""

    opening = PYTHON_TAG

    def _find(self, text: str, at: int) -> tuple[int, int | None]:
        if self._after is not Previous.CONTENT:
            between = (_BETWEEN if self._after is Previous.CALL else BLANKS).match(text, at)
            end = between.end() if between else at
            begun = "".join(text[end : end + 64].split())
            if any(key.startswith(begun) for key in _KEYS):
                return at, None
            if begun.startswith(_KEYS):
                return at, end
        return super()._find(text, at)

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        return self._json_call(text, ("parameters",), needs_arguments=True)


def _llama3_rules(functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool) -> str:
    """The rules for one call, as the templates refuse turns with more."""
    return lark.one_of("calls", [f'{lark.json_call(one, "parameters")} "}}"' for one in functions])


# -- Mistral: a list, or since Mistral Small 3.2 a name, `[ARGS]` and an object for each call -----------

MISTRAL_OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralParser(CallParser):
    """Reads both forms. A name may have `[CALL_ID]` and an id behind it."""

    opening = MISTRAL_OPEN

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        if (first := (yield from text.after_blanks())) in "[{":
            read = self._json_calls if first == "[" else self._json_call
            return (yield from read(text, ("arguments", "parameters")))
        name = yield from text.run(_NAME)
        if (yield from text.one_of(ARGS, CALL_ID)) == CALL_ID:
            yield from text.run(_WORD)
            yield from text.one_of(ARGS)
        return (yield from self._named_call(name or None, text))


def _with_short_ids(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with ids that Mistral's templates take: nine letters and digits."""
    changed = dict(message)
    if "tool_call_id" in message:
        changed["tool_call_id"] = _short_id(message["tool_call_id"])
    if "tool_calls" in message:
        changed["tool_calls"] = [
            {**call, "id": _short_id(call["id"])} for call in message["tool_calls"]
        ]
    return changed


def _short_id(call_id: str) -> str:
    if re.fullmatch("[a-zA-Z0-9]{9}", call_id):
        return call_id
    return blake2b(call_id.encode(errors="surrogatepass"), digest_size=8).hexdigest()[:9]


_MISTRAL: dict[str, Any] = {
    "delimiters": (MISTRAL_OPEN, ARGS, CALL_ID),
    "make_parser": MistralParser,
    "message": _with_short_ids,
    "is_shown": False,
}

# -- Kimi K2 --------------------------------------------------------------------------------------------

KIMI_CALL, KIMI_ARGUMENTS, KIMI_CALL_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_KIMI = Markup(
    (f"{KIMI_CALL}functions.", KIMI_CALL_END),
    f":{WORD}{KIMI_ARGUMENTS}",
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)
_KIMI_ID = re.compile(r"[^<>\s]*")
_KIMI_NAME = re.compile(r"(?:functions\.)?(.+?)(?::[\w-]*)?")


class KimiParser(MarkupParser):
    """A call has an id, which is `functions.`, the name, a colon and a number, and then the object. An id
    may lack what is before the name, or behind it."""

    def __init__(self, functions: Sequence[Function] = ()) -> None:
        super().__init__(functions, markup=replace(_KIMI, call=(KIMI_CALL, KIMI_CALL_END)))

    def _one(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        yield from text.run(BLANKS)
        name = _KIMI_NAME.fullmatch((yield from text.run(_KIMI_ID)))
        yield from text.delimiter(KIMI_ARGUMENTS)
        calls = yield from self._named_call(name and name[1], text)
        yield from text.delimiter(KIMI_CALL_END)
        return calls


# -- GigaChat 3 -----------------------------------------------------------------------------------------

_GIGACHAT = Markup(
    ("<|message_sep|>\n\nfunction call<|role_sep|>\n", ""), '", "arguments": ', JsonObject()
)


class GigaChatParser(MarkupParser):
    """A call is a turn of its own. What is before it ends other turns, too, and is no content there."""

    def __init__(self, functions: Sequence[Function] = ()) -> None:
        super().__init__(functions, markup=_GIGACHAT)

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall] | None]:
        yield from text.after_blanks()  # nothing, at the end
        return (yield from super()._read(text)) if self._schemas else ()

    def finish(self) -> list[Part]:
        """The rest without the end of the turn."""
        parts = super().finish()
        is_end = parts and isinstance(parts[-1], str) and parts[-1].strip() == self.opening
        return parts[:-1] if is_end else parts


_LIST = partial(Markup, ("", ""), '", "arguments": ', JsonObject(), between=", ")
FORMATS = (
    # Qwen2.5's, Qwen3's, Granite 4's and Corral's own chat templates ask for it, too.
    of_markup(
        "hermes",
        ("<tool_call>", r'(?:<tool_call>(?:\\n|\s)*\{\\*"name|\{"name": <function-name>,)'),
        Markup(("<tool_call>\n", "\n</tool_call>"), '", "arguments": ', JsonObject(), between="\n"),
    ),
    of_markup(
        "phi4",
        (r"<\|tool_call\|>", r"<\|/tool_call\|>"),
        Markup(("<|tool_call|>", "<|/tool_call|>"), '", "arguments": ', JsonObject()),
    ),
    of_markup("firefunction", (r" functools\[",), _LIST(section=(" functools[", "]"))),
    of_markup(
        "granite",
        (r"<\|tool_call\|> followed by a JSON list",),
        _LIST(section=(f"{_GRANITE_OPEN}[", "]")),
        message=_granite_message,
    ),
    # GigaChat 3. 3.1's template shows its own form.
    of_markup(
        "gigachat",
        ("'function call'", r"message_sep", r"role_sep"),
        _GIGACHAT,
        make_parser=GigaChatParser,
        has_channels=True,
        thinks=False,
        is_shown=False,
    ),
    of_markup("nemotron", ("<TOOLCALL>",), _LIST(section=("<TOOLCALL>[", "]</TOOLCALL>"))),
    of_markup(
        "functionary",
        ("<function=", "</function>", r"<\|python_tag\|>"),
        Markup(("<function=", "</function>"), ">"),
    ),
    # Qwen3-Coder, Qwen3.5, Nemotron 3 and Step 3.5.
    of_markup(
        "qwen-coder",
        ("<tool_call>", "<function=", "<parameter="),
        Markup(
            ("<tool_call>\n<function=", "</function>\n</tool_call>"),
            ">\n",
            Tagged(("<parameter=", ">\n"), "\n</parameter>\n"),
            between="\n",
        ),
    ),
    # GLM 4.5 to 4.7.
    of_markup(
        "glm",
        ("<tool_call>", "<arg_key>", "<arg_value>"),
        Markup(
            ("<tool_call>", "</tool_call>"),
            "",
            Tagged(("<arg_key>", "</arg_key><arg_value>"), "</arg_value>"),
        ),
    ),
    of_markup(
        "minimax",
        ("<minimax:tool_call>", "<invoke name=", "<parameter name="),
        Markup(
            ('\n<invoke name="', "</invoke>"),
            '">\n',
            Tagged(('<parameter name="', '">'), "</parameter>\n"),
            section=("<minimax:tool_call>", "\n</minimax:tool_call>"),
        ),
    ),
    ToolFormat(
        name="llama3",
        template_patterns=(r'\{\\*"name\\*": function name, \\*"parameters\\*":',),
        delimiters=(PYTHON_TAG,),
        make_parser=Llama3Parser,
        rules=_llama3_rules,
    ),
    of_markup(
        "mistral-list", (r"\[TOOL_CALLS\]",), _LIST(section=(f"{MISTRAL_OPEN}[", "]")), **_MISTRAL
    ),
    of_markup(
        "mistral-named",
        (r"\[TOOL_CALLS\]", r"\[ARGS\]"),
        Markup((MISTRAL_OPEN, ""), ARGS),
        **_MISTRAL,
    ),
    # V3 and R1. V3.1's template shows its own form.
    of_markup(
        "deepseek",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),  # noqa: RUF001  # these bars are theirs
        Markup(
            ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```<｜tool▁call▁end｜>"),  # noqa: RUF001
            "\n```json\n",
            section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),  # noqa: RUF001
            between="\n",
        ),
    ),
    of_markup(
        "kimi",
        (re.escape(_KIMI.opening), re.escape(KIMI_ARGUMENTS)),
        _KIMI,
        make_parser=KimiParser,
        is_shown=False,
    ),
)
