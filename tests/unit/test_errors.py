"""Every error survives the way to another process."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from serve_app.base import errors
from serve_app.base.errors import CorralError

EXAMPLES: list[CorralError] = [
    errors.CorralError("broken"),
    errors.ConfigError("engine.n_slots must be at least 1."),
    errors.RequestError("bad"),
    errors.InvalidRequestError("bad"),
    errors.InvalidRequestError("bad", "stop"),
    errors.PromptTooLongError(9, 8),
    errors.PromptTooLongError(9, 8, "messages"),
    errors.PromptTooLongError(9, 8, "prompt", False),
    errors.KeyLimitError("300 prompt tokens"),
    errors.FieldRefusedError(
        "no threads", "thread", {"error_code": "x", "unsupported": ["thread"]}
    ),
    errors.PicturesWantedError("messages", (("http://a/", "Picture 1 of 1"),)),
    errors.ItemNotFoundError("msg_1", True),
    errors.ItemNotFoundError("msg_1", False),
    errors.AuthenticationError("no key"),
    errors.ModelLoadingError("not yet", 7),
    errors.PermissionDeniedError("not yours"),
    errors.PermissionDeniedError("too low", "priority"),
    errors.HostNotAllowedError("who?"),
    errors.CrossSiteError("from where?"),
    errors.TextTooLongError(9, 8),
    errors.TextTooLongError(9, 8, "input"),
    errors.ModelNotFoundError("gpt"),
    errors.RequestNotFoundError("no such request"),
    errors.ResponseNotFoundError("resp_1"),
    errors.PreviousResponseError("resp_1"),
    errors.ObjectNotFoundError("no such file"),
    errors.SlowRequestError("too slow"),
    errors.RequestTooLargeError("too large"),
    errors.HeadTooLargeError("headers are too large"),
    errors.ContentEncodingError("compressed"),
    errors.RateLimitError("too fast", 3),
    errors.BodyEndedError("no room", 1),
    errors.DeadlineError("late", 7),
    errors.QueueFullError("full", 7),
    errors.NoRoomError("still full", 1),
    errors.MediaError("no eyes", "messages"),
    errors.NotSupportedError("no folder"),
    errors.NotSupportedError("no tokens", "suffix"),
    errors.EngineUnavailableError("loading"),
    errors.ModelReplacedError("another vocabulary"),
    errors.EngineClosedError("closed"),
    errors.DecodeError("status 1"),
    errors.ConstraintError("nothing fits"),
    errors.CacheFullError("no room for 3 tokens more"),
    errors.DecodeCancelledError("left"),
    errors.EngineFailedError("failed"),
    errors.ChannelBrokenError("gone"),
    errors.LedgerError("not now"),
    errors.StorageFullError("full"),
]


def tree(error: type[CorralError]) -> Iterator[type[CorralError]]:
    yield error
    for child in error.__subclasses__():
        yield from tree(child)


def test_every_class_has_an_example() -> None:
    defined = {cls for cls in tree(CorralError) if cls.__module__ == errors.__name__}
    assert {type(error) for error in EXAMPLES} == defined


def test_docstring_draws_every_class() -> None:
    for cls in tree(CorralError):
        if cls.__module__ == errors.__name__:
            assert f"{cls.__name__} " in (errors.__doc__ or "")


@pytest.mark.parametrize("error", EXAMPLES, ids=repr)
def test_pickle_round_trip(error: CorralError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    for name in ("args", "message", "status", "type", "code", "param", "retry_after_s"):
        assert getattr(copy, name) == getattr(error, name), name
    assert str(copy) == str(error) == error.message


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "param", "retry_after_s"),
    [
        (errors.CorralError("x"), 500, "server_error", None, None, None),
        (errors.InvalidRequestError("x", "n"), 400, "invalid_request_error", None, "n", None),
        (
            errors.PromptTooLongError(9, 8, "prompt"),
            400,
            "exceed_context_size_error",
            "context_length_exceeded",
            "prompt",
            None,
        ),
        (
            errors.ModelNotFoundError("m"),
            404,
            "invalid_request_error",
            "model_not_found",
            "model",
            None,
        ),
        (errors.KeyLimitError("x"), 400, "invalid_request_error", "key_limit_exceeded", None, None),
        (
            errors.AuthenticationError("x"),
            401,
            "authentication_error",
            "invalid_api_key",
            None,
            None,
        ),
        (errors.RateLimitError("x", 3), 429, "rate_limit_error", "rate_limit_exceeded", None, 3),
        (errors.QueueFullError("x", 3), 429, "rate_limit_error", "queue_full", None, 3),
        (errors.EngineClosedError("x"), 503, "server_error", "engine_closed", None, 1),
        (errors.DecodeError("x"), 500, "server_error", "decode_failed", None, None),
        (
            errors.ConstraintError("x"),
            400,
            "invalid_request_error",
            "constraint_failed",
            None,
            None,
        ),
        (errors.EngineFailedError("x"), 500, "server_error", "engine_failed", None, None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, CorralError) else "",
)
def test_what_it_is_over_http(
    error: CorralError,
    status: int,
    kind: str,
    code: str | None,
    param: str | None,
    retry_after_s: int | None,
) -> None:
    assert (error.status, error.type, error.code) == (status, kind, code)
    assert (error.param, error.retry_after_s) == (param, retry_after_s)


def test_too_long_prompt_names_both_numbers() -> None:
    message = errors.PromptTooLongError(4097, 4096).message
    assert "4097" in message
    assert "4096" in message
    assert "--context" in message
