"""The model's own chat template: Jinja, rendered in a sandbox as Hugging Face's `transformers` does.

Source of the environment (trim_blocks, lstrip_blocks, loop controls, `generation`, `raise_exception`,
`strftime_now`, `tojson`): the chat templating chapter of the transformers documentation, and
`utils/chat_template_utils.py` there.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from datetime import datetime
from typing import Any, NoReturn, TypeVar

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from serve_app.base.errors import ConfigError, InvalidRequestError
from serve_app.kernels.llama import chat_templates
from serve_app.prompt import output_parser, template_caps, tool_calls
from serve_app.prompt.template_caps import TemplateCaps
from serve_app.prompt.template_text import TemplateText, formatting

# Far beyond any context: a request's body has 8 MiB, and a template may repeat some of it.
_MOST_CHARS = 2**25
# What one multiplication may make: templates make lines and indents.
_MOST_MADE = 2**20

T = TypeVar("T")
Message = Mapping[str, Any]
"""`role`, `content` and whatever else the template reads."""

_DATES = {"datetime": "%b %d %Y", "date_string": "%d %b %Y"}
"""Variables with today's date, as llama-server gives them."""


class Template(ABC):
    """A chat template of any kind. Any thread."""

    reasoning_tags: output_parser.ReasoningTags | None = None
    """The tags around its model's reasoning, if it has any that is not on a channel."""
    thinks = False
    """Whether its model may think before it answers."""
    names: frozenset[str] = frozenset()
    """The variables that it reads."""

    @functools.cached_property
    def tool_format(self) -> tool_calls.ToolFormat:
        """How it asks for calls, or how they are asked for if it does not, or not in a way that shows."""
        return tool_calls.GENERIC

    @functools.cached_property
    def caps(self) -> TemplateCaps:
        return template_caps.probe(self.render, self.names)

    @abstractmethod
    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> TemplateText:
        """The prompt that asks for the assistant's next turn; the conversation alone if
        `add_generation_prompt` is false. `tools` are functions as OpenAI describes them; `extra` are more
        variables for the template, which else has `enable_thinking`.

        Raises InvalidRequestError, in the template's own words, for messages that it does not take, and for
        a text without end.
        """


class ChatTemplate(Template):
    """A compiled Jinja template. Raises ConfigError if it is not valid."""

    def __init__(self, source: str, *, bos: str, eos: str) -> None:
        self._template, names = _compile(source)
        self._own_tokens = {"bos_token": TemplateText.own(bos), "eos_token": TemplateText.own(eos)}
        self._known_format = (
            tool_calls.detect(source) if names & {"tools", "functions"} else None
        ) or tool_calls.GENERIC
        form = self._known_format
        tags = form.thought and output_parser.ReasoningTags(*form.thought)
        self.reasoning_tags = tags or output_parser.reasoning_tags(source)
        self.thinks = (form.has_channels and form.thinks) or self.reasoning_tags is not None
        self.names = names
        self._reserved = {
            *("messages", "tools", "add_generation_prompt"),
            *(self._template.globals.keys() | self._own_tokens.keys()),
        }
        self._without_tools: Mapping[str, Any] = {"tools": None}
        if "tools" in names and not self._takes_a_chat():
            # Some want a list, and take what is undefined for an empty one.
            self._without_tools = {}

    @functools.cached_property
    def tool_format(self) -> tool_calls.ToolFormat:
        if not self._known_format.is_shown or "tools" not in self.names:
            return self._known_format
        return tool_calls.derive(
            functools.partial(self.render, add_generation_prompt=False),
            self._known_format,
            self.caps,
            eos=self._own_tokens["eos_token"],
        )

    def _takes_a_chat(self) -> bool:
        try:
            self.render([{"role": "user", "content": "Hello"}])
        except InvalidRequestError:
            return False
        return True

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> TemplateText:
        extra = extra or {}
        for name in sorted(self._reserved & extra.keys()):
            raise InvalidRequestError(
                f"chat_template_kwargs: {name!r} cannot be set by a request.",
                "chat_template_kwargs",
            )
        # Roles are words of the API: templates make control tokens of them.
        messages = [
            {**_reasoning_by_all_names(message), "role": TemplateText.own(message["role"])}
            for message in map(self._known_format.message, messages)
        ]
        given = {
            "messages": _Given(messages),
            "add_generation_prompt": add_generation_prompt,
            **self._own_tokens,
            **self._without_tools,
        }
        if tools:
            given["tools"] = _Given(tools)
        own: dict[str, Any] = {name: _strftime_now(pattern) for name, pattern in _DATES.items()}
        if "functions" in self.names:  # FireFunction's
            own["functions"] = _tojson(tools, indent=2) if tools else ""
        if "enable_thinking" in self.names and self.thinks:
            own["enable_thinking"] = True
        try:
            return _concat(self._template.generate({**own, **extra}, **given))
        except Exception as error:  # a template may do anything with what it is given
            raise InvalidRequestError(
                f"The model's chat template refuses these messages: {error}", "messages"
            ) from error


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> tuple[jinja2.Template, frozenset[str]]:
    """A template and the variables that it reads."""
    environment = _Environment(
        optimized=False,  # constants that are folded would be no texts of the template's
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationTag],
    )
    environment.filters |= {"tojson": _tojson, "join": _join, "safe": lambda text: text}
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    try:
        names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        return environment.from_string(source), frozenset(names)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"The model's chat template is not valid: {error}") from error


def delimiters(source: str) -> list[str]:
    """The texts that structure the answers which a template asks for: reasoning, and calls. Some of them
    are control tokens in some vocabularies."""
    try:
        derived = ChatTemplate(source, bos="", eos="").tool_format.delimiters
    except ConfigError:
        derived = ()
    return [*derived, *(text for text in output_parser.DELIMITERS if text in source)]


def _reasoning_by_all_names(message: Message) -> Message:
    """The message with its reasoning by the names that templates have for it, as in `transformers`."""
    reasoning = message.get("reasoning_content")
    return {"thinking": reasoning, "reasoning": reasoning, **message} if reasoning else message


class _Given(list[T]):
    """A list that a template may not change."""


class _OwnConstants(CodeGenerator):
    """Writes each string constant of a template as its own text."""

    def visit_Const(  # noqa: N802  # Jinja's name
        self, node: nodes.Const, frame: Frame
    ) -> None:
        """Jinja calls this for constants in expressions."""
        if isinstance(node.value, str):
            self.write(f"environment.own({node.value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_Concat(  # noqa: N802  # Jinja's name
        self, node: nodes.Concat, frame: Frame
    ) -> None:
        """Jinja calls this for `~`."""
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.own({super()._output_const_repr(group)})"


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, which bounds `range`, and bounds what multiplies, too: a client chooses the numbers."""

    code_generator_class = _OwnConstants
    concat = staticmethod(TemplateText.concat)
    own = staticmethod(TemplateText.own)
    intercepted_binops = frozenset(("*", "**"))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja asks this for `str.format`."""
        write = super().wrap_str_format(value)
        return write and formatting(write, value.__self__)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Jinja asks this. Templates make lists of their own, and may change them, as at llama-server."""
        is_own = isinstance(obj, list) and not isinstance(obj, _Given)
        return (is_own and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Jinja calls this for these operators."""
        if _size(operator, left, right) > _MOST_MADE:
            raise SecurityError(f"{operator!r} would make more than {_MOST_MADE} characters")
        return super().call_binop(context, operator, left, right)


def _size(operator: str, left: Any, right: Any) -> int:
    """How long the result is: what it holds, or the bits of a number."""
    if isinstance(left, int) and isinstance(right, int):
        n_bits = left.bit_length()
        return n_bits * abs(right) if operator == "**" else n_bits + right.bit_length()
    if isinstance(left, int):
        left, right = right, left
    return len(left) * right if isinstance(left, Sized) and isinstance(right, int) else 0


class _GenerationTag(Extension):
    """`{% generation %}` around what the assistant says: for training, and nothing to a prompt."""

    tags = frozenset(("generation",))  # type: ignore[assignment]  # Jinja's type is a set

    def parse(self, parser: Parser) -> nodes.Node:
        """Parses the content, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _concat(pieces: Iterable[str]) -> TemplateText:
    made, n_chars = [], 0
    for piece in pieces:
        n_chars += len(piece)
        if n_chars > _MOST_CHARS:
            raise jinja2.TemplateError(f"the text has more than {_MOST_CHARS} characters")
        made.append(piece)
    return TemplateText.concat(made)


@jinja2.pass_environment
def _join(
    environment: jinja2.Environment,
    values: Iterable[Any],
    d: str = "",
    attribute: str | int | None = None,
) -> TemplateText:
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    return TemplateText.concat(values, d)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_as_list,
    )


def _as_list(value: object) -> list[object]:
    """The list that filters such as `map` make, as in llama-server."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class NamedTemplate(Template):
    """A template that llama.cpp renders. It reads roles and texts: no tools, no variables."""

    def __init__(self, name: str) -> None:
        self._name = name

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> TemplateText:
        # Digits that no user foresees stand for the texts, so that it shows what the template wrote.
        secret = f"{secrets.randbelow(10**12):012}"
        turns = [
            (str(message["role"]), f"{secret}<{place}>" if message["content"] else "")
            for place, message in enumerate(messages)
        ]
        rendered = chat_templates.apply(
            self._name, turns, add_generation_prompt=add_generation_prompt
        )
        parts = re.split(rf"{secret}<(\d+)>", rendered)
        return TemplateText.concat(
            str(messages[int(part)]["content"]) if place % 2 else TemplateText.own(part)
            for place, part in enumerate(parts)
        )
