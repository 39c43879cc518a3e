"""Forms, in pieces of any size."""

from __future__ import annotations

from itertools import pairwise

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.base.errors import InvalidRequestError, RequestTooLargeError
from serve_app.server.http.upload_form import UploadForm

KIND = 'multipart/form-data; boundary="xx"'


def read(
    body: bytes, *cuts: int, kind: str = KIND, max_bytes: int = 10_000
) -> tuple[UploadForm, bytes]:
    sunk = bytearray()
    form = UploadForm(kind, sunk.extend, max_bytes)
    edges = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    for start, end in pairwise(edges):
        form.feed(body[start:end])
    return form, bytes(sunk)


@given(
    contents=st.one_of(
        st.binary(max_size=200),
        st.lists(st.sampled_from([b"\r\n", b"--", b"xx", b"a"])).map(b"".join),
    ).filter(lambda text: b"\r\n--xx" not in b"\r\n" + text),
    purpose=st.sampled_from(["batch", ""]),
    cuts=st.lists(st.integers(0, 1000), max_size=20),
    file_first=st.booleans(),
)
def test_any_file_in_any_pieces(
    contents: bytes, purpose: str, cuts: list[int], file_first: bool
) -> None:
    field = b'--xx\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + purpose.encode()
    file = (
        b'--xx\r\nContent-Disposition: form-data; name="file"; filename="a b.jsonl"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n" + contents
    )
    parts = [file, field] if file_first else [field, file]
    form, sunk = read(b"\r\n".join([*parts, b"--xx--\r\n"]), *cuts)
    assert form.complete
    assert (sunk, form.n_bytes) == (contents, len(contents))
    assert form.fields == {"purpose": purpose}
    assert form.filename == "a b.jsonl"


def test_what_clients_send() -> None:
    request = httpx.Request(
        "POST",
        "http://x",
        data={"purpose": "batch", "expires_after[seconds]": "3600"},
        files={"file": ("über.jsonl", b"{}\n")},
    )
    form, sunk = read(request.read(), 7, kind=request.headers["content-type"])
    assert sunk == b"{}\n"
    assert form.filename == "über.jsonl"
    assert form.fields == {"purpose": "batch", "expires_after[seconds]": "3600"}


@pytest.mark.parametrize(
    "kind", ["application/json", "multipart/form-data", "", "multipart/form-data; boundary="]
)
def test_other_kinds_are_refused(kind: str) -> None:
    with pytest.raises(InvalidRequestError):
        UploadForm(kind, lambda _: None, 1)


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param(b"X: y", id="no name"),
        pytest.param(b"X: " + b"y" * 10_000, id="too long"),
        pytest.param(
            b'Content-Disposition: form-data; name="file"\r\n\r\n\r\n--xx\r\n'
            b'Content-Disposition: form-data; name="file"',
            id="two files",
        ),
    ],
)
def test_odd_fields_are_refused(headers: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        read(b"--xx\r\n" + headers + b"\r\n\r\n1\r\n--xx--")


def test_long_fields_and_files_are_refused() -> None:
    field = b'--xx\r\nContent-Disposition: form-data; name="%s"\r\n\r\n' + b"y" * 9000
    with pytest.raises(InvalidRequestError):
        read(field % b"purpose" + b"\r\n--xx--")
    with pytest.raises(RequestTooLargeError):
        read(field % b"file" + b"\r\n--xx--", max_bytes=8999)


def test_a_form_that_is_cut_off_is_not_complete() -> None:
    form, sunk = read(b'--xx\r\nContent-Disposition: form-data; name="file"\r\n\r\nabc')
    assert not form.complete
    assert b"abc".startswith(sunk)
