"""Vocabularies in which the delimiters of calls and reasoning are control tokens, with real chat templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter, LlamaFileType, TokenType

from serve_app.demo_model.gguf_file import ModelShape, add_hyperparameters
from serve_app.llama.model import ANSWER_DELIMITERS, Model
from serve_app.prompt import grammars, output_parser
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.prompt.tool_calls import ToolCall

TEMPLATES = Path(__file__).parents[2] / "data" / "templates"
TOOLS = [{"type": "function", "function": {"name": "now"}}]


def write(path: Path, template: str) -> Path:
    """A vocabulary of bytes and marks, and no weights."""
    end = "<|end|>"
    space = {" ": "Ġ", "\n": "Ċ"}
    text = [space.get(chr(i), chr(i)) for i in [10, *range(32, 127)]]
    tokens = [*text, *ANSWER_DELIMITERS, end]
    writer = GGUFWriter(path, "qwen3")
    shape = ModelShape("marks", 1, 32, 32, 1, 1, 32, len(tokens), 512)
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


@pytest.mark.parametrize(
    ("file", "call", "hidden"),
    [
        ("mistral-nemo", '[TOOL_CALLS][{"name": "now", "arguments": {}}]', "<|python_tag|>"),
        ("mistral-small-3.2", "[TOOL_CALLS]now[ARGS]{}", "<think>"),
        ("qwen3", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "[ARGS]"),
        (
            "qwen3-coder",
            "<tool_call>\n<function=now>\n</function>\n</tool_call>",
            "</think>",
        ),
    ],
)
def test_marks_are_shown_read_and_made(tmp_path: Path, file: str, call: str, hidden: str) -> None:
    path = write(tmp_path / "marks.gguf", (TEMPLATES / f"{file}.jinja").read_text())
    model, tokenizer = Model(path, vocab_only=True), Tokenizer(path)
    said = model.tokenize(f"So. {call}{hidden}", add_special=False, parse_special=True)
    assert said[-1] == model.delimiter_token(hidden)
    text = model.detokenize(said)
    assert text == f"So. {call}"  # and what is no mark of this template is not shown

    parser = tokenizer.output_parser([1], TOOLS)
    parts: list[Any] = [*parser.feed(text), *parser.finish()]
    assert parts == ["So. ", ToolCall("now", "{}")]

    assert tokenizer.tool_format is not None
    free, forced = (
        grammars.from_tool_calls(
            [{"name": "now"}],
            tokenizer.tool_format,
            tokenizer.delimiter_token,
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
        assert not takes(model, grammar, call.replace("now", "then"))


def test_calls_are_not_made_within_reasoning(tmp_path: Path) -> None:
    path = write(tmp_path / "marks.gguf", (TEMPLATES / "qwen3.jinja").read_text())
    model, tokenizer = Model(path, vocab_only=True), Tokenizer(path)
    assert tokenizer.tool_format is not None
    grammar = grammars.from_tool_calls(
        [{"name": "now"}],
        tokenizer.tool_format,
        tokenizer.delimiter_token,
        forced=False,
        parallel=False,
        param="tools",
    )
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    reasoning = f"{output_parser.REASONING_OPEN}\nHm.\n{output_parser.REASONING_CLOSE}\n\n"
    assert takes(model, grammar, f"{reasoning}Yes.")
    assert takes(model, grammar, f"{reasoning}{call}")
    assert not takes(model, grammar, f"{output_parser.REASONING_OPEN}{call}")
