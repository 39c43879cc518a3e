"""Which compiled grammars are kept."""

from __future__ import annotations

from typing import Any

from serve_app.kernels.llama.grammars.constraint import CompiledGrammars, Constraint


class Compiled:
    """Can be referred to weakly."""


class Compiler:
    """Notes what it compiles."""

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def __call__(self, grammar: str) -> Any:
        self.compiled.append(grammar)
        return Compiled()


def test_the_last_grammars_are_kept_up_to_so_many_bytes() -> None:
    compiler = Compiler()
    grammars = CompiledGrammars(compiler, 10)
    for name in ("aaaa", "bbbb", "aaaa", "cccc", "aaaa"):
        grammars[name]
    assert compiler.compiled == ["aaaa", "bbbb", "cccc"]
    grammars["bbbb"]
    assert compiler.compiled == ["aaaa", "bbbb", "cccc", "bbbb"]


def test_a_large_one_is_kept_as_long_as_it_is_used() -> None:
    """A request for many answers has one grammar for all."""
    compiler = Compiler()
    grammars = CompiledGrammars(compiler, 10)
    used = grammars["l" * 100]
    assert grammars["l" * 100] is used
    del used
    grammars["l" * 100]
    assert compiler.compiled == ["l" * 100] * 2


def test_a_large_one_pushes_out_nobody() -> None:
    compiler = Compiler()
    grammars = CompiledGrammars(compiler, 10)
    for name in ("small", "l" * 100, "small"):
        grammars[name]
    assert compiler.compiled == ["small", "l" * 100]


def test_a_sequences_constraint_is_a_use() -> None:
    grammars = CompiledGrammars(lambda _: Constraint(Matcher(), 8), 10)  # type: ignore[arg-type]
    fresh = grammars["l" * 100].fresh()
    assert grammars["l" * 100] is fresh._origin


class Matcher:
    """One that takes everything."""

    def is_error(self) -> bool:
        return False

    def deep_copy(self) -> Matcher:
        return self
