"""Vocabularies in which delimiters of calls and reasoning are control tokens, with real chat templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter, LlamaFileType, TokenType

from serve_app.kernels.llama.model import Model
from serve_app.prompt import grammars
from serve_app.prompt.chat_template import delimiters
from serve_app.prompt.grammars import Dialect
from serve_app.prompt.output_parser import DELIMITERS, THINK
from serve_app.prompt.tokenizer import Tokenizer
from tests.unit.prompt.tool_calls.formats import (
    EXAMPLE_CALLS,
    EXAMPLE_FUNCTIONS,
    EXAMPLES,
    TEMPLATES,
    TOOLS,
    format_of,
)
from tools.gguf_file import ModelShape, add_hyperparameters


def write(path: Path, template: str) -> Path:
    """A vocabulary of bytes and delimiters, and no weights."""
    end = "<|finish|>"
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [chr(256 + i) for i in range(256 - len(plain))]  # as GPT-2 writes these bytes
    text = [*map(chr, plain), *others]
    tokens = [*text, *DELIMITERS, end]
    writer = GGUFWriter(path, "qwen3")
    shape = ModelShape("delimiters", 1, 32, 32, 1, 1, 32, len(tokens), 512)
    add_hyperparameters(writer, shape, LlamaFileType.ALL_F32, rope_base=1e6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    controls = [TokenType.CONTROL] * (len(tokens) - len(text))
    writer.add_token_types([*([TokenType.NORMAL] * len(text)), *controls])
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_eos_token_id(tokens.index(end))
    writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


def takes(model: Model, grammar: str, text: str) -> bool:
    constraint = model.constraint(grammar)
    tokens = model.tokenize(text, add_special=False, parse_special=True)
    return all(constraint.take(token) for token in tokens)


WITH_OPENING = [path for path in TEMPLATES if format_of(path).opening]


@pytest.mark.usefixtures("vocabularies_alone")
@pytest.mark.parametrize("path", WITH_OPENING, ids=lambda path: path.stem)
def test_delimiters_are_shown_read_and_made(tmp_path: Path, path: Path) -> None:
    form = format_of(path)
    source, call = path.read_text(), EXAMPLES[form.name].first
    hidden = next(text for text in DELIMITERS if text not in source)
    path = write(tmp_path / "delimiters.gguf", source)
    model, tokenizer = Model(path, vocab_only=True, delimiters=delimiters), Tokenizer(path)
    said = model.tokenize(f"So. {call}{hidden}", add_special=False, parse_special=True)
    assert said[-1] == model.delimiter_token(hidden)
    text = model.detokenize(said)
    assert text == f"So. {call}"  # and what is no delimiter of this template is not shown

    parser = tokenizer.output_parser([1], TOOLS)
    parts: list[Any] = [*parser.feed(text), *parser.finish()]
    assert parts == ["So. ", EXAMPLE_CALLS[0]]

    assert tokenizer.tool_format.name == form.name
    free, forced = (
        grammars.from_tool_calls(
            EXAMPLE_FUNCTIONS,
            Dialect(form, tokenizer.delimiter_token),
            forced=forced,
            parallel=False,
            param="tools",
        )
        for forced in (False, True)
    )
    assert takes(model, free, f"So. {call}")
    assert takes(model, forced, call)
    assert not takes(model, forced, f"So. {call}")
    for grammar in (free, forced):
        assert not takes(model, grammar, call.replace("get_weather", "get_whether"))


@pytest.mark.usefixtures("vocabularies_alone")
def test_calls_are_not_made_within_reasoning(tmp_path: Path) -> None:
    (template,) = (path for path in TEMPLATES if path.stem == "qwen3")
    path = write(tmp_path / "delimiters.gguf", template.read_text())
    model, tokenizer = Model(path, vocab_only=True, delimiters=delimiters), Tokenizer(path)
    grammar = grammars.from_tool_calls(
        [{"name": "now"}],
        Dialect(tokenizer.tool_format, tokenizer.delimiter_token),
        forced=False,
        parallel=False,
        param="tools",
    )
    call = EXAMPLES["hermes"].second
    reasoning = f"{THINK.open}\nHm.\n{THINK.close}\n\n"
    assert takes(model, grammar, f"{reasoning}Yes.")
    assert takes(model, grammar, f"{reasoning}{call}")
    assert not takes(model, grammar, f"{THINK.open}{call}")
