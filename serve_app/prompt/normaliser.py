"""Fits a conversation to what a chat template can take.

Clients send conversations in many shapes: several system messages, neighbours of one role, an assistant
that greets first, results of tools with text behind. Most templates take most of them. A template takes a
shape if it renders it, with the texts of the system and the users in their order. Otherwise the
conversation is changed into the one shape that every template takes. That is perhaps a system message,
then turns of the user and the assistant in alternation, with results right behind their calls.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from serve_app.base.errors import InvalidRequestError
from serve_app.prompt.chat_template import Template
from serve_app.prompt.conversation import Conversation, PastCall, Turn, in_tags
from serve_app.prompt.template_caps import TemplateCaps
from serve_app.prompt.template_text import TemplateText

PARAGRAPH = "\n\n"
_PARTS = PARAGRAPH
"""The text that llama-server puts between the parts of a message that is continued."""
_BLANK = " "
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Stands at the end of an answer that is begun. It is transformers' own, which some templates look for."""
_VOLATILE = re.compile(r"^x-anthropic-billing-header:[^\n]*(?:\n|\Z)", re.MULTILINE)
"""Lines of a system message that differ from request to request and mean nothing to a model. Claude Code's
differs with the user's first message, so that no two sessions would share a prefix."""


def render(
    template: Template,
    turns: list[Turn],
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    **options: Any,
) -> TemplateText:
    """The conversation as the template writes it with these tools and variables, and other options of
    `Template.render`. Raises InvalidRequestError if the template takes it in no shape, or leaves out a
    user's text."""
    caps, form = template.caps, template.tool_format
    if form.split is not None:
        turns = [form.split(turn) if turn.role == "assistant" else turn for turn in turns]
    describe = form.describe
    if describe is not None and (tools or any(turn.calls or turn.role == "tool" for turn in turns)):
        turns, tools = _alternate(describe(turns, tools)), ()  # results are users' turns now
    attempts = [(False, variables, tools), (True, variables, tools)]
    if "reasoning_effort" in variables:  # which has other words in some templates
        others = {name: value for name, value in variables.items() if name != "reasoning_effort"}
        attempts.append((True, others, tools))
    if tools:  # of which some want every parameter to be described
        attempts.append((True, variables, [_with_descriptions(tool) for tool in tools]))
    errors = []
    for is_strict, extra, shown in attempts:
        shape = fit_calls(turns, caps)
        messages = as_messages(strict(shape, caps) if is_strict else shape, caps, is_strict)
        try:
            text = template.render(messages, shown, extra=extra, **options)
        except InvalidRequestError as error:
            errors.append(error)
            continue
        lost = missing_text(turns, text, in_order=not is_strict)
        if lost is None:
            return text
        message = f"The model's chat template leaves out a message: {lost[:80]!r}"
        errors.append(InvalidRequestError(message, "messages"))
    raise errors[0]


def _with_descriptions(schema: Any) -> Any:
    """The tool, or the part of its schema, with a description of each property."""
    if isinstance(schema, list):
        return [_with_descriptions(inner) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    described = {key: _with_descriptions(inner) for key, inner in schema.items()}
    if isinstance(properties := described.get("properties"), dict):
        described["properties"] = {
            name: {"description": "", **inner} if isinstance(inner, dict) else inner
            for name, inner in properties.items()
        }
    return described


def render_begun(
    template: Template,
    turns: list[Turn],
    begun: Turn,
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
) -> tuple[TemplateText, str]:
    """The conversation up to the text of an answer that is begun, and this text, both as the template
    writes an assistant's turn. A template that does not write it begins a turn, with the text behind.
    Raises InvalidRequestError like `render`.

    Source: transformers, `continue_final_message` in `utils/chat_template_utils.py`.
    """
    caps = template.caps
    if begun.role not in caps.joining_roles:
        joint = caps.joint if caps.joining_roles else _PARTS
        begun = begun.with_text(joint.join(begun.texts))
    *texts, last = begun.texts
    tagged = replace(begun, parts=(*texts, last + _TAG))
    with contextlib.suppress(InvalidRequestError):
        whole = render(template, [*turns, tagged], tools, variables, add_generation_prompt=False)
        text = whole[: max(whole.rfind(_TAG.strip()), 0)]
        text = text if whole.startswith(_TAG, len(text)) else text.rstrip()
        first = begun.texts[0]
        start = text.rfind(first if first in text else first.strip())
        if start >= 0 and last.strip() in text[start:]:
            return text[:start], text[start:]
    return render(template, turns, tools, variables), begun.text


def fit_calls(turns: list[Turn], caps: TemplateCaps) -> list[Turn]:
    """The turns with calls as the template takes them."""
    if not caps.parallel_calls:
        turns = _one_call_a_turn(turns)
    if not caps.calls_beside_content:
        turns = list(itertools.chain.from_iterable(map(_with_calls_apart, turns)))
    return turns


def strict(turns: list[Turn], caps: TemplateCaps) -> list[Turn]:
    """The turns in the one shape that every template takes."""
    turns = _lone_results_as_users(turns)
    n_leading = next((i for i, turn in enumerate(turns) if turn.role != "system"), len(turns))
    leading, others = turns[:n_leading], _with_late_system_as_users(turns[n_leading:])
    if leading:
        leading = [_join_turns(leading)]
    if leading and not caps.system:
        others.insert(0, Turn("user", (leading.pop().text,)))
    if not others or others[0].role == "assistant":
        others.insert(0, Turn("user", ("",)))
    return [*leading, *_alternate(others)]


def _join_turns(turns: Iterable[Turn]) -> Turn:
    first, *others = turns
    for turn in others:
        text = PARAGRAPH.join(text for text in (first.text, turn.text) if text)
        reasoning = PARAGRAPH.join(text for text in (first.reasoning, turn.reasoning) if text)
        first = replace(
            first, parts=(text,), reasoning=reasoning, calls=(*first.calls, *turn.calls)
        )
    return first


def complete(turns: Conversation) -> list[Turn]:
    """The conversation without lines that mean nothing to a model, and with an id for each call."""
    return _with_ids(_without_volatile(turn) if turn.role == "system" else turn for turn in turns)


def _without_volatile(turn: Turn) -> Turn:
    if not _VOLATILE.search(turn.text):
        return turn
    texts = (_VOLATILE.sub("", text) for text in turn.texts)
    return replace(turn, parts=tuple(text for text in texts if text))


def _with_ids(turns: Iterable[Turn]) -> list[Turn]:
    """The turns with an id for each call, and with an id and a function's name for each result. A result
    that names no call is of the first call, of its function if there is one, that has no result yet."""
    named: list[Turn] = []
    waiting: list[PastCall] = []
    names: dict[str, str] = {}
    for place, turn in enumerate(turns):
        if turn.role == "assistant" and turn.calls:
            calls = tuple(
                replace(call, call_id=call.call_id or f"call_{place}_{number}")
                for number, call in enumerate(turn.calls)
            )
            waiting = list(calls)
            names |= {call.call_id: call.name for call in calls}
            turn = replace(turn, calls=calls)
        elif turn.role == "tool":
            of_name = (call.call_id for call in waiting if call.name == turn.name)
            default = waiting[0].call_id if waiting else f"call_{place}"
            call_id = turn.call_id or next(of_name, default)
            waiting = [call for call in waiting if call.call_id != call_id]
            turn = replace(turn, call_id=call_id, name=turn.name or names.get(call_id, ""))
        named.append(turn)
    return named


def _one_call_a_turn(turns: list[Turn]) -> list[Turn]:
    """Calls in turns of their own, each with its result behind it."""
    single: list[Turn] = []
    place = 0
    while place < len(turns):
        turn = turns[place]
        place += 1
        if len(turn.calls) < 2:
            single.append(turn)
            continue
        results = list(itertools.takewhile(lambda turn: turn.role == "tool", turns[place:]))
        place += len(results)
        for number, call in enumerate(turn.calls):
            parts, reasoning = (turn.parts, turn.reasoning) if number == 0 else ((), "")
            single.append(replace(turn, parts=parts, reasoning=reasoning, calls=(call,)))
            single += [result for result in results if result.call_id == call.call_id]
        ids = {call.call_id for call in turn.calls}
        single += [result for result in results if result.call_id not in ids]
    return single


def _with_calls_apart(turn: Turn) -> list[Turn]:
    if not (turn.calls and turn.text):
        return [turn]
    return [replace(turn, calls=()), replace(turn, parts=(), reasoning="")]


def _lone_results_as_users(turns: list[Turn]) -> list[Turn]:
    """Results without calls before them as users' turns."""
    ids: set[str] = set()
    changed: list[Turn] = []
    for turn in turns:
        ids |= {call.call_id for call in turn.calls}
        is_lone = turn.role == "tool" and turn.call_id not in ids
        changed.append(Turn("user", in_tags("tool", turn.text)) if is_lone else turn)
    return changed


def _with_late_system_as_users(turns: list[Turn]) -> list[Turn]:
    """System messages as users' turns, behind the results of calls that stand before."""
    changed: list[Turn] = []
    held: list[Turn] = []
    for turn in turns:
        if turn.role == "system":
            held.append(Turn("user", in_tags("system", turn.text)))
            continue
        if turn.role != "tool":
            changed += held
            held = []
        changed.append(turn)
    return changed + held


def _alternate(turns: list[Turn]) -> list[Turn]:
    shaped: list[Turn] = []
    for turn in turns:
        before = shaped[-1] if shaped else None
        after_calls = before is not None and (before.role == "tool" or bool(before.calls))
        if before is None or turn.role not in ("user", "assistant"):
            shaped.append(turn)
        elif after_calls and turn.role == "user":
            shaped += [Turn("assistant", ("",)), turn]
        elif before.role == turn.role and not before.calls:
            shaped[-1] = _join_turns((before, turn))
        else:
            shaped.append(turn)
    return shaped


def as_messages(
    turns: Iterable[Turn], caps: TemplateCaps, is_strict: bool = False
) -> list[dict[str, Any]]:
    """The turns as templates read them; in the strict shape, an answer without a text is a blank."""
    return [_as_message(turn, caps, is_strict) for turn in turns]


def _as_message(turn: Turn, caps: TemplateCaps, is_strict: bool) -> dict[str, Any]:
    is_blank = is_strict and turn.role == "assistant" and not turn.text and not turn.calls
    content = caps.content(*((_BLANK,) if is_blank else turn.texts or ("",)), role=turn.role)
    message: dict[str, Any] = {"role": turn.role, "content": content}
    if turn.name:
        message["name"] = turn.name
    if turn.role == "tool":
        message["tool_call_id"] = turn.call_id
    if turn.reasoning and caps.reasoning_part:
        texts = [{"type": "text", "text": text} for text in turn.texts if text]
        message["content"] = [{"type": "thinking", "thinking": turn.reasoning}, *texts]
    elif turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call, caps)},
            }
            for call in turn.calls
        ]
    return message


def _arguments(call: PastCall, caps: TemplateCaps) -> Mapping[str, Any] | str:
    value = call.value
    if isinstance(value, dict):
        return value if caps.object_arguments else json.dumps(value, ensure_ascii=False)
    return call.arguments if caps.text_arguments else {"arguments": call.arguments}


_WORD = re.compile(r"\w+")


def missing_text(turns: Iterable[Turn], rendered: str, *, in_order: bool) -> str | None:
    """A user's text of which the rendered prompt has not even the longest word; None if there is none. With
    `in_order`, the system's texts count, too, and each is behind those before, but for leading ones."""
    at, is_leading = 0, True
    for turn in turns:
        is_leading = is_leading and turn.role == "system"
        if turn.role != "user" and not (in_order and turn.role == "system"):
            continue
        longest = max(_WORD.findall(turn.text), key=len, default="")
        if turn.role == "system" and not is_leading and (whole := turn.text.strip()) in rendered:
            longest = whole  # one word may stand elsewhere, too
        places = [rendered.find(word, at) for word in (longest, json.dumps(longest)[1:-1])]
        if max(places) < 0:
            return turn.text
        if in_order and not is_leading:
            at = min(place for place in places if place >= 0)
    return None
