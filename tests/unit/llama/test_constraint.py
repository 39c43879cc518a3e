"""Which compiled grammars are kept."""

from __future__ import annotations

from typing import Any, cast

from serve_app.llama.constraint import CompiledGrammars


class Compiler:
    """Notes what it compiles."""

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def __call__(self, grammar: str) -> Any:
        self.compiled.append(grammar)
        return cast(Any, object())


def test_the_last_grammars_are_kept_up_to_so_many_bytes() -> None:
    compiler = Compiler()
    grammars = CompiledGrammars(compiler, 10)
    first = grammars["aaaa"]
    grammars["bbbb"]
    assert grammars["aaaa"] is first, "it is the last one now"
    grammars["cccc"]
    assert grammars["aaaa"] is first
    assert compiler.compiled == ["aaaa", "bbbb", "cccc"]
    grammars["bbbb"]
    assert compiler.compiled == ["aaaa", "bbbb", "cccc", "bbbb"]


def test_the_very_last_one_is_kept_whatever_its_size() -> None:
    """A request for many answers has one grammar for all."""
    compiler = Compiler()
    grammars = CompiledGrammars(compiler, 10)
    kept = grammars["small"]
    large = grammars["l" * 100]
    assert grammars["l" * 100] is large
    grammars["small"]
    assert grammars["small"] is not kept
    assert compiler.compiled == ["small", "l" * 100, "small"]
