"""What Mistral's two formats of tool calls have in common: `[TOOL_CALLS]`, a parser, short ids.

Source: the tokenizers of Mistral AI's `mistral-common`, versions 3 to 13.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from serve_app.prompt.tool_calls.calls import ToolCall
from serve_app.prompt.tool_calls.parser import CallParser
from serve_app.prompt.tool_calls.reader import BLANKS, Reading, TextReader

DELIMITERS = OPEN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

_NAME, _WORD = re.compile(r"[\w.-]*"), re.compile(r"\w*")


class MistralParser(CallParser):
    """Takes both formats."""

    opening = OPEN

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        yield from text.run(BLANKS)
        first = yield from text.peek()
        if first in "[{":
            read = self._json_calls if first == "[" else self._json_call
            return (yield from read(text, ("arguments",)))
        name = yield from text.run(_NAME)
        if (yield from text.one_of(ARGUMENTS, CALL_ID)) == CALL_ID:
            yield from text.run(_WORD)
            yield from text.one_of(ARGUMENTS)
        return (yield from self._named_call(name or None, text))


def with_short_ids(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with ids that Mistral's templates take: nine letters and digits."""
    changed = dict(message)
    if "tool_call_id" in message:
        changed["tool_call_id"] = _short(message["tool_call_id"])
    if "tool_calls" in message:
        changed["tool_calls"] = [
            {**call, "id": _short(call["id"])} for call in message["tool_calls"]
        ]
    return changed


def _short(call_id: str) -> str:
    if re.fullmatch("[a-zA-Z0-9]{9}", call_id):
        return call_id
    return blake2b(call_id.encode(errors="surrogatepass"), digest_size=8).hexdigest()[:9]
