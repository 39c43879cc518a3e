"""The types of files and batches, and of the requests about them.

Source: OpenAI's API reference, "Files" and "Batch".
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from serve_app.server.answering.requests import RequestMetadata
from serve_app.server.http.request_model import RequestModel

T = TypeVar("T")
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
ENDED = ("failed", "completed", "expired", "cancelled")
"""The statuses in which nothing more is done."""


class ExpiresAfter(RequestModel):
    """The time when a batch's files are deleted by themselves."""

    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)]


class BatchRequest(RequestModel):
    """The body of `POST /v1/batches`."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=64)]
    endpoint: Endpoint
    completion_window: Annotated[str, Field(pattern=r"^[1-9]\d{0,5}[smhd]$")]
    metadata: RequestMetadata | None = None
    output_expires_after: ExpiresAfter | None = None


class _Object(BaseModel):
    model_config = ConfigDict(frozen=True)


class FileObject(_Object):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class _Page(_Object, Generic[T]):
    object: Literal["list"] = "list"
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, objects: list[Any], limit: int) -> Self:
        """The first of these objects. There are more of them if one more is given."""
        shown = objects[:limit]
        return cls(
            data=shown,
            first_id=shown[0].id if shown else None,
            last_id=shown[-1].id if shown else None,
            has_more=len(objects) > limit,
        )


class FileList(_Page[FileObject]): ...


class DeletedFile(_Object):
    """A file that is gone."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class LineError(_Object):
    """The problem with a line of an input file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class LineErrors(_Object):
    """Why a batch failed: the first of them."""

    object: Literal["list"] = "list"
    data: list[LineError]


class RequestCounts(_Object):
    total: int
    completed: int
    failed: int


class BatchObject(_Object):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: LineErrors | None = None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, str] | None = None


class BatchList(_Page[BatchObject]): ...
