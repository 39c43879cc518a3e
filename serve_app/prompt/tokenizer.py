"""A model's vocabulary and chat template, without its weights."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from serve_app.base.errors import (
    ConfigError,
    InvalidRequestError,
    NotSupportedError,
    TextTooLongError,
)
from serve_app.base.formats import EmbeddingPooling
from serve_app.base.sampling import ReasoningBudget
from serve_app.kernels.llama import chat_templates
from serve_app.kernels.llama.model import Model
from serve_app.prompt import normaliser
from serve_app.prompt.chat_template import ChatTemplate, NamedTemplate, Template, delimiters
from serve_app.prompt.conversation import Conversation, Turn
from serve_app.prompt.grammars import Dialect
from serve_app.prompt.output_parser import THINK, OutputParser, ReasoningTags
from serve_app.prompt.template_caps import TemplateCaps
from serve_app.prompt.template_text import TemplateText, control_tokens
from serve_app.prompt.tool_calls import ToolFormat
from serve_app.prompt.tool_calls.calls import FunctionNames
from serve_app.prompt.tool_calls.format import ThinkingPhase

# No fewer than `<think>` and the line ends behind it can have, in any vocabulary.
_REASONING_TOKENS = 16
# What llama-server puts before a file for models without a token for that.
_SNIPPET = "\n\n--- snippet ---\n\n"
# The labels that llama.cpp's converter gives to Qwen3's rerankers.
_RELEVANT_OR_NOT = ("yes", "no")
# Where a reranking model's template has the texts.
_PAIR = "{query}", "{document}"
_PLACES = re.compile(f"({'|'.join(map(re.escape, _PAIR))})")
# Tokens that the borders of a template may join, at most.
_JOINED = 8
# Of more models than these, a start opens the files twice.
_MOST_OPEN = 16


# Source: llama.cpp, gguf-py/gguf/constants.py, `Keys.General.SAMPLING_*`.
_RECOMMENDED = {
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "temp": "temperature",
    "penalty_last_n": "repeat_last_n",
    "penalty_repeat": "repeat_penalty",
}


def keep_first(tokens: Sequence[int], n_most: int) -> Sequence[int]:
    """The first so many tokens."""
    return tokens[:n_most]


def keep_last(tokens: Sequence[int], n_most: int) -> Sequence[int]:
    """The last so many tokens."""
    return tokens[max(0, len(tokens) - n_most) :]


class Tokenizer:
    """Turns text and chats into prompts. Any thread. Raises ConfigError if the file is no model."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        chat_template: str | None = None,
        pooling: EmbeddingPooling | None = None,
    ) -> None:
        """`chat_template` takes the place of the file's: a source, or a name that llama.cpp knows. Models
        without any get `chatml`, as from llama-server. `pooling` takes the place of the file's, too."""
        self.model = Model(path, vocab_only=True, delimiters=delimiters)
        """The model's file: its metadata, and no weights."""
        self.pooling = self.model.pooling_with(pooling)
        """How the vectors of a text's tokens become an embedding, or a score."""
        longest_first = sorted(self.model.control_texts, key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.bos = self._special(self.model.bos)
        """The text of the token that begins a text; empty if there is none."""
        self.eos = self._special(self.model.eos)
        """The text of the token that ends one."""
        given = chat_template or self.model.chat_template
        self.chat_template = given or "chatml"
        """The source of the chat template, or its name."""
        self._template: Template = (
            NamedTemplate(self.chat_template)
            if self.chat_template in chat_templates.names()
            else ChatTemplate(self.chat_template, bos=self.bos, eos=self.eos)
        )
        for_tools = None if chat_template else self.model.tool_chat_template
        self._tool_template = for_tools and ChatTemplate(for_tools, bos=self.bos, eos=self.eos)
        """The template for chats with tools, if the file has one of its own for these."""
        self.has_template = given is not None
        """Whether somebody has chosen that template."""

    def warm_up(self) -> None:
        """Find out now what is found out once, at the first text or chat. Processes that are forked from
        this one would each do it again: with a large vocabulary, it takes a tenth of a second."""
        self.least_tokens(0)
        self.labels  # noqa: B018  # is cached
        self.template_caps  # noqa: B018  # is cached

    @property
    def template_caps(self) -> TemplateCaps:
        return self._template.caps

    @property
    def tool_format(self) -> ToolFormat:
        return (self._tool_template or self._template).tool_format

    @property
    def thinks(self) -> bool:
        """Whether the model may think before it answers."""
        return self._template.thinks

    @property
    def reasoning_tags(self) -> ReasoningTags:
        """The tags around the model's reasoning, if it has any."""
        return self._template.reasoning_tags or THINK

    @property
    def recommended_sampling(self) -> Mapping[str, Any]:
        """The sampling parameters that the model's file recommends, by the names of SamplingParams."""
        found = {
            ours: self.model.meta(f"general.sampling.{theirs}")
            for theirs, ours in _RECOMMENDED.items()
        }
        return {name: _number(text) for name, text in found.items() if text is not None}

    @property
    def can_infill(self) -> bool:
        """Whether the model has tokens for `encode_infill`."""
        return self.model.infill_tokens is not None

    @property
    def has_classifier(self) -> bool:
        """Whether the model classifies or ranks texts, instead of making embeddings."""
        return self.pooling == "rank"

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of a classifier's outputs; empty for a single output without a label."""
        return self.model.labels if self.has_classifier else ()

    @property
    def reranks(self) -> bool:
        """Whether the first output says how relevant a document is: it is the only one, or Qwen3's."""
        return self.has_classifier and (len(self.labels) < 2 or self.labels == _RELEVANT_OR_NOT)

    def encode_pair(
        self,
        query: str,
        document: str,
        n_most: int | None = None,
        cut: Callable[[Sequence[int], int], Sequence[int]] = keep_first,
    ) -> tuple[int, ...]:
        """The tokens for a reranking model: by its own template as in llama-server, or see
        `Model.encode_pair`. Control tokens written out in the texts stay text.

        If the pair has more than `n_most` tokens, its texts are `cut`, the longer one first, and the
        template stays whole. Raises TextTooLongError if that leaves no room for any text."""
        if n_most is None:
            return self._encode_pair(query, document)
        of_query, of_document = self._plain(query), self._plain(document)
        n_template = len(self._encode_pair("", ""))
        room = n_most - n_template
        if len(of_query) + len(of_document) < room + _JOINED:
            pair = self._encode_pair(query, document)
            if len(pair) <= n_most:
                return pair
        while room > 0:
            n_query = min(len(of_query), max(room // 2, room - len(of_document)))
            pair = self._encode_pair(cut(of_query, n_query), cut(of_document, room - n_query))
            if len(pair) <= n_most:
                return pair
            room -= len(pair) - n_most
        raise TextTooLongError(n_template + 1, n_most, "documents")

    def _encode_pair(
        self, query: str | Sequence[int], document: str | Sequence[int]
    ) -> tuple[int, ...]:
        """The tokens of a pair, whose texts may be plain tokens already."""
        template, pair = self.model.rerank_template, (query, document)
        if template is None:
            plain = [self._plain(one) if isinstance(one, str) else one for one in pair]
            return tuple(self.model.encode_pair(*plain))
        read = [one if isinstance(one, str) else self.decode(one).strip("\ufffd") for one in pair]
        texts = dict(zip(_PAIR, read, strict=True))
        parts = _PLACES.split(template)
        own = [texts.get(part, TemplateText.own(part)) for part in parts]
        return tuple(self._encode_rendered(TemplateText.concat(own)))

    def least_tokens(self, n_chars: int) -> int:
        """A text of so many characters has so many tokens at least."""
        return n_chars // self.model.longest_text

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a plain prompt, with BOS if the model wants it; control tokens written out
        in the text are recognised, as llama-server does."""
        return (
            *self.model.first_tokens,
            *self.model.tokenize(text, add_special=False, parse_special=True),
        )

    def encode_for_embedding(self, text: str) -> tuple[int, ...]:
        """The tokens of a text that becomes an embedding, with those that the model wants around it."""
        return self.tokenize(text, add_special=True, parse_special=True)

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> tuple[int, ...]:
        """The tokens of any text; see `serve_app.kernels.llama.model.Model.tokenize`."""
        return tuple(
            self.model.tokenize(text, add_special=add_special, parse_special=parse_special)
        )

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token; see `serve_app.kernels.llama.model.Model.piece`."""
        return self.model.piece(token, special=special)

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """The text of tokens; what is not UTF-8 becomes U+FFFD. Pictures, which are negative, have none."""
        return self.model.detokenize((one for one in tokens if one >= 0), special=special)

    def delimiter_token(self, text: str) -> int | None:
        """The token that is this text and delimits, as `Model.delimiter_token`."""
        return self.model.delimiter_token(text)

    def encode_infill(self, before: str, after: str, prompt: str = "") -> tuple[int, ...]:
        """The tokens of a prompt for what is between two texts, as llama-server has them: prefix, suffix,
        middle. `prompt` goes on with the first text; control tokens written out in it are recognised.
        Raises NotSupportedError if the model has no tokens for that."""
        infill = self.model.infill_tokens
        if infill is None:
            raise NotSupportedError("This model has no tokens for infill.", "suffix")
        prefix, suffix, middle = infill
        said = self.model.tokenize(prompt, add_special=False, parse_special=True)
        bos = self.model.first_tokens
        before_tokens, after_tokens = self._plain(before), self._plain(after)
        return (*bos, prefix, *before_tokens, *said, suffix, *after_tokens, middle)

    def encode_infill_files(self, files: Iterable[tuple[str, str]]) -> tuple[int, ...]:
        """The tokens that llama-server puts before such a prompt. They are other files, each a name and
        a text, and the names of the repository and of the file, which nobody tells it."""
        repository, file = self.model.repository_tokens
        tokens = [] if repository is None else [repository, *self._plain("myproject\n")]
        for name, text in files:
            tokens += self._plain(_SNIPPET) if file is None else [file, *self._plain(f"{name}\n")]
            tokens += self._plain(text)
        return (*tokens, *([] if file is None else [file, *self._plain("filename\n")]))

    def _plain(self, text: str) -> list[int]:
        return self.model.tokenize(text, add_special=False, parse_special=False)

    def render_chat(
        self,
        conversation: Conversation,
        tools: Sequence[Mapping[str, Any]] = (),
        extra: Mapping[str, Any] | None = None,
        thinks: bool = True,
        *,
        add_generation_prompt: bool = True,
        begun: Turn | None = None,
    ) -> TemplateText:
        """A chat as text, up to where the assistant's turn begins, or without `add_generation_prompt`,
        to the end of the last turn. If it shall not think, reasoning that the template begins is ended.
        `begun` is an assistant's turn whose text the answer continues. Raises InvalidRequestError if
        the chat template takes the messages in no shape, or leaves out a user's text."""
        template = self._template_for(conversation, tools)
        names = FunctionNames.of_tools(tools)
        tools = names.rename(tools)
        turns = normaliser.complete(names.renamed_calls(conversation))
        if begun is None:
            text, answer = (
                normaliser.render(
                    template, turns, tools, extra or {}, add_generation_prompt=add_generation_prompt
                ),
                "",
            )
        else:
            text, answer = normaliser.render_begun(template, turns, begun, tools, extra or {})
        is_thinking = text.rstrip().endswith(self.reasoning_tags.open)
        if is_thinking and (not thinks or begun is not None):
            text = text.rstrip() + TemplateText.own(f"\n\n{self.reasoning_tags.close}\n\n")
        return text + answer

    def _template_for(
        self, conversation: Conversation, tools: Sequence[Mapping[str, Any]]
    ) -> Template:
        calls = tools or any(turn.calls or turn.role == "tool" for turn in conversation)
        return (self._tool_template if calls else None) or self._template

    def encode_chat(
        self, conversation: Conversation, *arguments: Any, **options: Any
    ) -> tuple[int, ...]:
        """The tokens of a chat as `render_chat`, with these arguments, writes it. Only the template's
        own control tokens become control tokens; those in messages, tools and `extra` stay text.
        An attachment becomes a negative token: -1 less its number in the conversation. Raises
        InvalidRequestError like `render_chat`."""
        marks = Marks()
        if any(turn.attachments for turn in conversation):
            conversation = [turn.with_marks(marks.next) for turn in conversation]
        text = self.render_chat(conversation, *arguments, **options)
        begins_itself = self.bos and text.startswith(self.bos)
        begin = () if begins_itself else self.model.first_tokens
        return (*begin, *self._encode_parts(text, marks))

    def _encode_parts(self, text: TemplateText, marks: Marks) -> Iterator[int]:
        """The tokens of a rendered text, and negative ones in the places of marks."""
        at = 0
        for match in marks.pattern.finditer(text):
            yield from self._encode_rendered(text[at : match.start()])
            yield -1 - int(match[1])
            at = match.end()
        yield from self._encode_rendered(text[at:])

    def _encode_rendered(self, text: TemplateText) -> Iterator[int]:
        """The tokens of a rendered text: only the template's own control tokens are some."""
        own = control_tokens(text, self._controls)
        if own == [match.span() for match in self._controls.finditer(text)]:
            yield from self.model.tokenize(text, add_special=False, parse_special=True)
            return
        at, after = 0, ""
        for start, end in [*own, (len(text), len(text))]:
            control = str.__str__(text[start:end])
            plain = self.model.trimmed_beside(after, str.__str__(text[at:start]), control)
            yield from self._plain(plain)
            yield from self.model.tokenize(control, add_special=False, parse_special=True)
            at, after = end, control

    def output_parser(
        self,
        prompt: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        thinks: bool = True,
        *,
        in_pieces: bool = False,
    ) -> OutputParser:
        """A parser of the answer to this prompt, of a chat with these tools; calls come `in_pieces`
        or whole. Reasoning stays in the content unless `thinks`."""
        form, names = self.tool_format, FunctionNames.of_tools(tools)
        tools, is_thinking = names.rename(tools), self.is_reasoning(prompt)
        calls = (
            form.parser(
                tools, in_pieces=in_pieces, splits_reasoning=thinks, is_thinking=is_thinking
            )
            if tools or form.has_channels
            else None
        )
        has_tags = self.thinks and not form.has_channels
        return OutputParser(
            calls,
            names,
            thinks=thinks and has_tags,
            is_thinking=is_thinking,
            tags=self.reasoning_tags,
        )

    def reasoning_budget(
        self, prompt: Sequence[int], n_tokens: int, message: str
    ) -> ReasoningBudget | None:
        """The bound of the reasoning in the answer to this prompt; `message` is what it ends with if the
        budget is used up. None if the model has no reasoning, or has it on a channel."""
        if not self.thinks or self.tool_format.has_channels:
            return None
        tags = self.reasoning_tags
        opening, closing, forced = (
            tuple(self.tokenize(text, add_special=False, parse_special=True))
            for text in (tags.open, tags.close, message + tags.close)
        )
        is_open = self.is_reasoning(prompt)
        return ReasoningBudget(n_tokens, len(prompt), is_open, opening, closing, forced)

    def dialect(self, prompt: Sequence[int]) -> Dialect:
        """The way in which the answer to this prompt is written, for grammars."""
        ending = self.decode(prompt[-_REASONING_TOKENS:], special=True).rstrip()
        thinking = ThinkingPhase.PERHAPS
        if not self.thinks or ending.endswith(self.reasoning_tags.close):
            thinking = ThinkingPhase.NEVER
        elif ending.endswith(self.reasoning_tags.open):
            thinking = ThinkingPhase.BEGUN
        return Dialect(self.tool_format, self.delimiter_token, thinking, self.reasoning_tags)

    def is_reasoning(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt ends within the answer's reasoning."""
        beginning = self.decode(prompt[-_REASONING_TOKENS:], special=True)
        return beginning.rstrip().endswith(self.reasoning_tags.open)

    def encode_system_prompt(self, text: str) -> tuple[int, ...]:
        """The tokens that every chat with this system prompt, and without tools, begins with. Raises
        ConfigError if the chat template has no system prompts."""
        try:
            one, other = (
                self.encode_chat([Turn("system", (text,)), Turn("user", (question,))])
                for question in ("a", "1")
            )
        except InvalidRequestError as error:
            raise ConfigError(f"engine.system_prompts: {error.message}") from error
        pairs = enumerate(zip(one, other, strict=False))
        return one[: next(place for place, (a, b) in pairs if a != b)]

    def _special(self, token: int | None) -> str:
        return "" if token is None else self.model.detokenize([token], special=True)


def open_tokenizer(
    path: str, chat_template: str | None, pooling: EmbeddingPooling | None
) -> Tokenizer:
    """The tokenizer of a file as it is now: the same one again until `forget_tokenizers`. A start looks at
    the file before it serves the model, and a large vocabulary takes half a second. Raises ConfigError."""
    file = Path(path)
    changed_ns = file.stat().st_mtime_ns if file.is_file() else 0
    return _open(path, chat_template, pooling, changed_ns)


@lru_cache(_MOST_OPEN)
def _open(
    path: str, chat_template: str | None, pooling: EmbeddingPooling | None, _changed_ns: int
) -> Tokenizer:
    return Tokenizer(path, chat_template, pooling)


def forget_tokenizers() -> None:
    """Have files opened anew from now on. Those that have an open one keep it."""
    _open.cache_clear()


class Marks:
    """Stands for the attachments of one chat in its text: digits, which no user foresees."""

    def __init__(self) -> None:
        self._secret = f"{secrets.randbelow(10**12):012}"
        self._n = 0
        self.pattern = re.compile(rf"{self._secret}<(\d+)>")
        """The pattern of marks; the group is the attachment's number."""

    def next(self) -> str:
        self._n += 1
        return f"{self._secret}<{self._n - 1}>"


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() and "." not in text else value
