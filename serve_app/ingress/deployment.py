"""The ingress as a Serve deployment, and its way to the engines' deployments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import numpy as np
from fastapi import FastAPI
from numpy.typing import NDArray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus

from serve_app.config.model_files import locate
from serve_app.config.resolved import ResolvedModel
from serve_app.errors import (
    CorralError,
    EngineClosedError,
    EngineFailedError,
    EngineUnavailableError,
    QueueFullError,
)
from serve_app.ingress.api import build_api
from serve_app.ingress.generation.failover import retried, unbroken
from serve_app.ingress.http.auth import Access
from serve_app.ingress.model_registry import ServedModel
from serve_app.logs import forward_to_serve
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.types import GenerationRequest, ReplicaStats, RequestRecord, SlotAction, TokenDelta

_STATS_TIMEOUT_S = 2.0
_SLOT_TIMEOUT_S = 60.0
_LEAVING_S = 1.0
"""When a client leaves, Serve cancels what its request has called, and then the request: the second comes
within so many seconds of the first."""


class HandleClient:
    """One model's engines behind a Serve handle. Used in the ingress's event loop."""

    def __init__(self, handle: DeploymentHandle[Any], vocabulary_key: bytes) -> None:
        """`vocabulary_key` is of the vocabulary that its requests' tokens are of."""
        self._handle = handle
        self._vocabulary_key = vocabulary_key
        self._stream: Any = handle.options(stream=True)

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta]:
        """See EngineClient."""
        return unbroken(request, self._attempt)

    async def _attempt(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta]:
        response = self._stream.generate.remote(request, self._vocabulary_key)
        async with _translated(response):
            async for delta in response:
                if isinstance(delta, CorralError):
                    raise delta
                yield delta

    async def embed(self, texts: tuple[tuple[int, ...], ...], client: str) -> NDArray[np.float32]:
        """See EngineClient."""
        return await retried(lambda: self._embed_once(texts, client))

    async def _embed_once(
        self, texts: tuple[tuple[int, ...], ...], client: str
    ) -> NDArray[np.float32]:
        response: Any = self._handle.embed.remote(texts, client, self._vocabulary_key)
        async with _translated(response):
            vectors: NDArray[np.float32] | CorralError = await response
            if isinstance(vectors, CorralError):
                raise vectors
        return vectors

    async def stats(self) -> list[ReplicaStats]:
        """See EngineClient. A replica that has just died is left out."""
        return [found for found in await self._ask_all("stats") if isinstance(found, ReplicaStats)]

    async def replica_states(self) -> dict[str, int]:
        """See EngineClient; Serve's controller knows."""
        try:
            status = await asyncio.to_thread(serve.status)
        except RayError:  # the controller is away; it comes back
            return {}
        application = status.applications.get(self._handle.app_name)
        if application is None or application.status == ApplicationStatus.DELETING:
            raise EngineClosedError("The application is being stopped.")
        deployment = application.deployments.get(self._handle.deployment_name)
        # Serve's model keeps the names of its states, and not the states that its types promise.
        return {} if deployment is None else cast(dict[str, int], deployment.replica_states)

    async def explain(self, wanted: str) -> list[RequestRecord]:
        """See EngineClient. A replica that has just died is left out."""
        answers = await self._ask_all("explain", wanted)
        return [record for found in answers if isinstance(found, list) for record in found]

    async def act_on_slot(
        self, replica_id: str, action: str, slot_id: int, name: str
    ) -> SlotAction:
        """See EngineClient."""
        arguments = replica_id, action, slot_id, name
        answers = await self._ask_all("act_on_slot", *arguments, timeout_s=_SLOT_TIMEOUT_S)
        for answer in answers:
            if isinstance(answer, SlotAction):
                return answer
            if isinstance(answer, RayError | CorralError):
                raise _translate(answer)
        raise EngineUnavailableError(f"The replica {replica_id} does not answer.")

    async def _ask_all(
        self, method: str, *arguments: Any, timeout_s: float = _STATS_TIMEOUT_S
    ) -> list[Any]:
        try:
            return await self._handle.broadcast(method, *arguments).results_async(
                timeout_s=timeout_s, return_exceptions=True
            )
        except DeploymentUnavailableError:
            return []
        except TimeoutError:  # Serve tells nothing of those that did answer
            message = f"A replica did not answer within {timeout_s:.0f} seconds."
            raise EngineUnavailableError(message) from None


@asynccontextmanager
async def _translated(response: Any) -> AsyncIterator[None]:
    """Whatever goes wrong behind this call is raised as a CorralError; at the end, the call is left."""
    try:
        yield
    except CorralError:
        raise
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        await asyncio.sleep(_LEAVING_S)  # nobody asks another replica for a client that has left
        raise EngineFailedError("The engine replica cancelled the request.") from None
    except Exception as error:  # of any kind, if a replica is lost while Serve chooses it
        raise _translate(error) from error
    finally:
        # Leaving a Serve stream does not stop it. Where no replica took the call, this raises once more
        # what that failed with, and would hide it.
        with suppress(Exception):
            response.cancel()


def _translate(error: Exception) -> CorralError:
    """What went wrong behind the handle, in Corral's terms."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, CorralError):
        return cause
    if isinstance(cause, BackPressureError):
        return QueueFullError("All replicas and their queues are full.", 1)
    if isinstance(cause, DeploymentUnavailableError):
        return EngineUnavailableError("No engine of this model is up.")
    return EngineFailedError(f"The engine replica failed ({type(cause).__name__}).")


def _served(model: ResolvedModel, handle: DeploymentHandle[Any]) -> ServedModel:
    tokenizer = Tokenizer(locate(model.source))
    return ServedModel(
        id=model.id,
        n_ctx_slot=model.options.n_ctx_slot,
        tokenizer=tokenizer,
        engine=HandleClient(handle, tokenizer.vocabulary_key),
    )


@serve.deployment
@serve.ingress()
class Ingress:
    """Speaks HTTP; holds every model's vocabulary and a handle to its engines."""

    def __init__(
        self, models: list[ResolvedModel], handles: list[DeploymentHandle[Any]], access: Access
    ) -> None:
        forward_to_serve()
        self._access = access
        pairs = zip(models, handles, strict=True)
        self._models = {model.id: _served(model, handle) for model, handle in pairs}

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve's hook for an application that is built in the replica."""
        return build_api(self._models, self._access)
