"""Texts that a grammar forces are tokenized in short pieces, cut between characters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve_app.kernels.llama.grammars.grammar_tokenizer import MAX_PIECE_BYTES, byte_pieces


@given(st.text(alphabet="aé中😀", max_size=4000).map(lambda text: 3 * text))
def test_pieces_are_short_and_whole(text: str) -> None:
    found = list(byte_pieces(text.encode()))
    assert all(0 < len(piece) <= MAX_PIECE_BYTES for piece in found)
    assert "".join(piece.decode() for piece in found) == text


def test_what_is_no_utf_8_is_cut_all_the_same() -> None:
    text = b"\x80" * (MAX_PIECE_BYTES + 1)
    assert b"".join(byte_pieces(text)) == text
