"""Where texts with long runs are cut."""

from __future__ import annotations

import re

import pytest

from serve_app.kernels.llama.long_runs import split_runs

WHOLE = re.compile(re.escape("<|im_end|>"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [""]),
        ("word " * 20, ["word " * 20]),
        ("a" * 16, ["a" * 16]),
        ("a" * 20, ["a" * 16, "a" * 4]),
        ("a b" + " " * 40, ["a b" + " " * 16, " " * 16, " " * 8]),
        ("字" * 10 + ",字" * 6, ["字" * 10 + ",字,字", ",字,字,字,字"]),
        ("aaaaaaaaaa<|im_end|>bbbb", ["aaaaaaaaaa", "<|im_end|>bbbb"]),
        ("<|im_end|>" * 3, ["<|im_end|>", "<|im_end|>", "<|im_end|>"]),
        ("!" * 40, ["!" * 16, "!" * 16, "!" * 8]),
    ],
)
def test_runs_are_cut(text: str, expected: list[str]) -> None:
    made = split_runs(text, WHOLE, longest=16)
    assert "".join(made) == text
    assert made == expected
