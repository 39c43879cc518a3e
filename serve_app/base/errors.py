"""Corral's exception tree, and what each error is over HTTP.

    CorralError                   500 server_error
    |-- ConfigError               never over HTTP: it stops the start
    |-- RequestError              400 invalid_request_error
    |   |-- InvalidRequestError     400 invalid_request_error
    |   |   |-- PromptTooLongError    400 context_length_exceeded
    |   |   |   `-- TextTooLongError  400 context_length_exceeded
    |   |   |-- ConstraintError       400 constraint_failed
    |   |   |-- KeyLimitError         400 key_limit_exceeded
    |   |   |-- FieldRefusedError     400 invalid_request_error, with details
    |   |   |-- PicturesWantedError   400 invalid_request_error, unless they are fetched
    |   |   `-- PreviousResponseError 400 previous_response_not_found
    |   |-- PermissionDeniedError   403 permission_denied
    |   |-- HostNotAllowedError     403 host_not_allowed
    |   |-- CrossSiteError          403 cross_site_request
    |   |-- ModelNotFoundError      404 model_not_found
    |   |-- RequestNotFoundError    404 request_not_found
    |   |-- ResponseNotFoundError   404 response_not_found
    |   |-- ItemNotFoundError       404 invalid_request_error
    |   |-- ObjectNotFoundError     404 object_not_found
    |   |-- SlowRequestError        408 request_timeout
    |   |-- RequestTooLargeError    413 request_too_large
    |   |-- HeadTooLargeError       431 header_too_large
    |   |-- ContentEncodingError    415 unsupported_content_encoding
    |   |-- MediaError              500 server_error, with x-should-retry: false
    |   `-- NotSupportedError       501 not_supported_error, with x-should-retry: false
    |-- AuthenticationError       401 invalid_api_key
    |-- RateLimitError            429 rate_limit_exceeded, with Retry-After
    |   |-- BodyEndedError        429 rate_limit_exceeded, with Retry-After
    |   |-- DeadlineError         429 deadline_unmet, with Retry-After
    |   `-- QueueFullError        429 queue_full, with Retry-After
    |       `-- NoRoomError       429 queue_full, with Retry-After
    |-- EngineUnavailableError    503 engine_unavailable
    |   |-- ModelLoadingError     503 engine_unavailable
    |   |-- ModelReplacedError    503 engine_unavailable
    |   `-- EngineClosedError     503 engine_closed
    |-- DecodeError               500 decode_failed
    |   |-- CacheFullError        500 decode_failed, if it cannot be helped
    |   `-- DecodeCancelledError  never over HTTP: nobody waits for it
    |-- EngineFailedError         500 engine_failed
    |   `-- ChannelBrokenError    500 engine_failed
    |-- LedgerError               500 server_error
    `-- StorageFullError          507 storage_full

An answer whose `Retry-After` is above MOST_PATIENCE_S has `x-should-retry: false`, too.

Errors cross processes: `args` of each has all that its class is called with, positionally, or the error
could not be made again there.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

MOST_PATIENCE_S = 60
"""The longest wait after which a client should try again by itself. Some packages would sleep for days."""


class CorralError(Exception):
    """Base of every error that Corral raises on purpose."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None
    is_final: ClassVar[bool] = False
    """Whether the same request fails again, though the status says that it may not."""
    param: str | None = None
    """The request's field that is wrong, if it is one field."""
    retry_after_s: int | None = None
    """Seconds after which a new try makes sense, if waiting helps."""
    details: Mapping[str, Any] = {}

    def __init_subclass__(cls, **over_http: int | str) -> None:
        """Set what a class of errors is over HTTP: the class variables that its header names."""
        super().__init_subclass__()
        for name, value in over_http.items():
            setattr(cls, name, value)

    def __init__(self, message: str) -> None:
        """`message` describes the error for the person who sent the request."""
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message

    @property
    def asks_patience(self) -> bool:
        """Whether a new try makes sense so late that whoever waits should hear of the error now."""
        return self.retry_after_s is not None and self.retry_after_s > MOST_PATIENCE_S


class ConfigError(CorralError):
    """The configuration cannot work; the message names the field."""


class RequestError(CorralError, status=400, type="invalid_request_error"):
    """A request cannot be served as it is, maybe because of one of its fields."""

    def __init__(self, message: str, param: str | None = None) -> None:
        Exception.__init__(self, message, param)
        self.message, self.param = message, param


class InvalidRequestError(RequestError):
    """The request itself is wrong: the same request will never work."""


class PromptTooLongError(
    InvalidRequestError, type="exceed_context_size_error", code="context_length_exceeded"
):
    """The prompt leaves no room for a single new token in a slot's context."""

    hint: ClassVar[str] = "Whoever runs the server can raise it with --context."

    def __init__(
        self, n_prompt: int, n_ctx_slot: int, param: str | None = None, exact: bool = True
    ) -> None:
        """The prompt has `n_prompt` tokens. Without `exact`, it may have more: nobody counted them."""
        Exception.__init__(self, n_prompt, n_ctx_slot, param, exact)
        at_least = "" if exact else "at least "
        self.message = (
            f"The prompt of {at_least}{n_prompt} tokens exceeds the available context size of {n_ctx_slot} "
            f"tokens, one of which must be left for the answer. {self.hint}"
        )
        self.param = param
        self.details = {"n_prompt_tokens": n_prompt, "n_ctx": n_ctx_slot}  # as llama-server


class TextTooLongError(PromptTooLongError):
    """A text to be embedded or ranked has more tokens than the model's context holds."""

    def __init__(self, n_tokens: int, n_max: int, param: str | None = None) -> None:
        super().__init__(n_tokens, n_max, param)
        self.args = n_tokens, n_max, param
        self.message = (
            f"The input is too large: a text has {n_tokens} tokens; this model takes {n_max} at "
            "once."
        )


class KeyLimitError(InvalidRequestError, code="key_limit_exceeded"):
    """The request is larger than its API key may send."""


class FieldRefusedError(InvalidRequestError):
    """A field is refused in words by which its clients do without it."""

    def __init__(self, message: str, param: str | None, details: Mapping[str, Any]) -> None:
        """`details` has the `error_code` that those clients know."""
        Exception.__init__(self, message, param, details)
        self.message, self.param, self.details = message, param, details


class PicturesWantedError(InvalidRequestError):
    """The request names pictures by URLs, and whoever read it does not fetch them."""

    def __init__(self, param: str | None, pictures: Sequence[tuple[str, str]]) -> None:
        """`pictures` are URLs, each with what its picture is called; one at least."""
        self.param, self.pictures = param, tuple(pictures)
        self.message = (
            f"{pictures[0][1]}: URLs are not fetched here. Send it as a data URL "
            "(data:image/png;base64,…)."
        )


class PreviousResponseError(InvalidRequestError, code="previous_response_not_found"):
    """The previous response is not stored for this client, or no longer."""

    param = "previous_response_id"

    def __init__(self, response_id: str) -> None:
        self.message = f"Previous response with id {response_id!r} not found."


class AuthenticationError(
    CorralError, status=401, type="authentication_error", code="invalid_api_key"
):
    """No API key, or none that is valid here."""


class PermissionDeniedError(RequestError, status=403, code="permission_denied"):
    """The sender is known, and may not do this."""


class HostNotAllowedError(RequestError, status=403, code="host_not_allowed"):
    """The request was sent to a name that this server does not go by."""


class CrossSiteError(RequestError, status=403, code="cross_site_request"):
    """A page of another web site sent the request, and may not."""


class ModelNotFoundError(RequestError, status=404, code="model_not_found"):
    """No model of that name is served here."""

    param = "model"

    def __init__(self, model: str) -> None:
        self.message = f"The model {model!r} does not exist here. GET /v1/models lists the models."


class RequestNotFoundError(RequestError, status=404, code="request_not_found"):
    """No request of that id is known here, or it is forgotten by now."""


class ResponseNotFoundError(RequestError, status=404, code="response_not_found"):
    """No response of that id is stored for this client, or no longer."""

    def __init__(self, response_id: str) -> None:
        self.message = f"Response with id {response_id!r} not found."


class ItemNotFoundError(RequestError, status=404):
    """No item of that id is in a stored response of this client's, or no longer."""

    param = "input"

    def __init__(self, item_id: str, is_kept: bool) -> None:
        """`is_kept`: whether the request's own items are. The message is OpenAI's."""
        Exception.__init__(self, item_id, is_kept)
        self.message = f"Item with id '{item_id}' not found."
        if not is_kept:
            self.message += (
                " Items are not persisted when `store` is set to false. Try again with `store` set "
                "to true, or remove this item from your input."
            )


class ObjectNotFoundError(RequestError, status=404, code="object_not_found"):
    """The caller has no file or batch of that id."""


class SlowRequestError(RequestError, status=408, code="request_timeout"):
    """The request's body did not arrive in time."""


class RequestTooLargeError(RequestError, status=413, code="request_too_large"):
    """The request's body is larger than any is."""


class HeadTooLargeError(RequestError, status=431, code="header_too_large"):
    """The request's headers, or what else is around its body, are larger than any are."""


class ContentEncodingError(RequestError, status=415, code="unsupported_content_encoding"):
    """The request's body is compressed in a form that is not taken."""


class RateLimitError(CorralError, status=429, type="rate_limit_error", code="rate_limit_exceeded"):
    """A client has used up what it may: try again after `retry_after_s` seconds."""

    retry_after_s: int

    def __init__(self, message: str, retry_after_s: int) -> None:
        self.message, self.retry_after_s = message, retry_after_s


class BodyEndedError(RateLimitError):
    """The room of the request's body, which was being read, was needed by others."""


class DeadlineError(RateLimitError, code="deadline_unmet"):
    """The request would be answered later than it may be, by the forecast."""


class QueueFullError(RateLimitError, code="queue_full"):
    """Slots and waiting queue are full, or the wait would be too long."""


class NoRoomError(QueueFullError):
    """The client was told QueueFullError a moment ago, and nobody asked the engines again."""


class MediaError(RequestError, status=500, type="server_error", is_final=True):
    """A message has a part that is no text: for llama-server's clients, a failure of the server."""


class NotSupportedError(RequestError, status=501, type="not_supported_error", is_final=True):
    """The model, or the configuration, has not what the request needs; no other request would do."""


class EngineUnavailableError(CorralError, status=503, code="engine_unavailable"):
    """No engine replica of this model is up: it is starting, or it failed to start."""

    retry_after_s: int = 1


class ModelLoadingError(EngineUnavailableError):
    """The model is loaded on demand, and that takes longer than a request waits."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        self.message, self.retry_after_s = message, retry_after_s


class ModelReplacedError(EngineUnavailableError):
    """The engine has another vocabulary than the one that the request's tokens are of."""


class EngineClosedError(EngineUnavailableError, code="engine_closed"):
    """The engine is draining or closed and takes no new work."""


class DecodeError(CorralError, code="decode_failed"):
    """llama.cpp could not decode this sequence's rows; its neighbours were not touched."""


class CacheFullError(DecodeError):
    """The KV cache has no room for a batch; nothing was decoded."""


class DecodeCancelledError(DecodeError):
    """A batch was cancelled before its end, because nobody waits for it any more."""


class ConstraintError(InvalidRequestError, code="constraint_failed"):
    """No token is left that the request's grammar allows, or the grammar takes too much. Other requests go
    on."""


class EngineFailedError(CorralError, code="engine_failed"):
    """The engine itself broke and ended every request it had."""


class ChannelBrokenError(EngineFailedError):
    """The connection broke that a request's tokens came over; the engine itself may be well."""


class LedgerError(CorralError):
    """The file of usage, budgets and keys cannot be used now."""


class StorageFullError(CorralError, status=507, code="storage_full"):
    """A folder of the server may hold no more."""


def fields_of(error: CorralError) -> tuple[str, list[Any]]:
    """The name and the arguments of the error, which `error_of` makes it of in another process."""
    return type(error).__name__, list(error.args)


def error_of(name: str, arguments: Sequence[Any]) -> CorralError:
    """The error of this name with these arguments. Raises ValueError if there is none."""
    try:
        return _classes()[name](*arguments)
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"There is no such error: {name[:64]!r}") from None


@functools.cache
def _classes() -> dict[str, type[CorralError]]:
    classes, by_name = [CorralError], dict[str, type[CorralError]]()
    while classes:
        error_class = classes.pop()
        by_name[error_class.__name__] = error_class
        classes += error_class.__subclasses__()
    return by_name
