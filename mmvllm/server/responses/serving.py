"""Serves OpenAI's Responses API: /v1/responses, and the routes for stored responses."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from mmvllm.server.chat.serving import tool_use
from mmvllm.server.common.descriptions import described_chat
from mmvllm.server.common.jobs import CompletionJob
from mmvllm.server.common.response_models import ERRORS, STREAMS
from mmvllm.server.common.serving import Serving
from mmvllm.server.common.structured import structured_field
from mmvllm.server.disconnects import while_connected
from mmvllm.server.errors import ApiError, renamed_errors
from mmvllm.server.http.auth_and_limits import ByteReservation
from mmvllm.server.responses.as_chat import NAMES_IN_CHATS, as_chat, image_params_of, messages_of
from mmvllm.server.responses.builder import REPEATED, ResponseObjectBuilder
from mmvllm.server.responses.input_items import page_of_input
from mmvllm.server.responses.protocol import (
    DeletedResponse,
    InputItems,
    InputTokens,
    Item,
    ItemReference,
    ResponseObject,
    ResponsesRequest,
)
from mmvllm.server.responses.store import ResponseStore, StoredResponse, not_stored
from mmvllm.utils.memory_limit import memory_of


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(route_class=serving.route_class)
    store = ResponseStore(serving.settings.max_stored_bytes, serving.settings.stored_seconds)

    @routes.post("/v1/responses", response_model=ResponseObject, responses=STREAMS, tags=["completions"])
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Create a response in the form of OpenAI's Responses API."""
        return await serving.respond(partial(response_job, serving, store), body, request.state.reservation)

    @routes.post("/v1/responses/input_tokens", responses=ERRORS, tags=["tokens"])
    async def count_input(body: ResponsesRequest, request: Request) -> InputTokens:
        """Count the prompt tokens that POST /v1/responses would process."""

        async def count() -> InputTokens:
            job = await serving.built(partial(response_job, serving, store), body, request.state.reservation)
            return InputTokens(input_tokens=len(await serving.tokenize(job.prompt.request, job.format_error)))

        return await while_connected(request.receive, count())

    routes.include_router(_stored(store))
    return routes


def response_job(
    serving: Serving, store: ResponseStore, body: ResponsesRequest, reservation: ByteReservation
) -> CompletionJob:
    """Return the job for a request of OpenAI's Responses API."""
    model, keys = serving.model_of(body.model, body.priority)
    given = _resolved(store, body.items, reservation)
    earlier = _earlier(store, body.previous_response_id, reservation)
    messages = messages_of(given, earlier)
    with renamed_errors(NAMES_IN_CHATS):
        chat = as_chat(body, messages)
        use = tool_use(serving, chat)
        image_params = image_params_of(given, earlier)
        prompt = serving.prompts.of_conversation(chat, use.tools, reservation, image_params, keys)
    if use.names and body.num_logprobs is not None:
        message = "log-probabilities cannot be used with tools; leave out top_logprobs and include, or the tools"
        raise ApiError(400, message, param="top_logprobs" if body.top_logprobs else "include")
    repeated = body.model_dump(include=REPEATED, by_alias=True)
    reservation.take(memory_of(repeated))  # it may be most of the body
    is_stored = body.store is not False and store.accepts(messages, repeated)
    add = partial(store.add, messages=messages, given=messages_of(given)) if is_stored else None
    builder = ResponseObjectBuilder(model, serving.engine.tokenizer, body, use.params, use, add)
    field = use.field or structured_field(chat).renamed(NAMES_IN_CHATS)
    described, streams = partial(described_chat, chat.messages), bool(body.stream)
    return CompletionJob([prompt.request], use.params, builder, described, prompt, field, streams)


def _earlier(store: ResponseStore, response_id: str | None, reservation: ByteReservation) -> Sequence[dict]:
    """Return the messages of the stored conversation that a request continues."""
    if response_id is None:
        return ()
    if (stored := store.get(response_id, renews=True)) is None:
        message = f"{not_stored('response', response_id)}; send the conversation as a whole"
        raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
    reservation.take(stored.size)
    return stored.messages


def _resolved(store: ResponseStore, items: Sequence[Item], reservation: ByteReservation) -> list[Item]:
    """Replace each reference by the item of a stored response that it names, counted in `reservation`."""
    resolved = []
    for i, item in enumerate(items):
        found = item
        if isinstance(item, ItemReference):
            if (found := store.output_item(item.id)) is None:
                raise ApiError(400, not_stored("item", item.id), param=f"input[{i}].id")
            reservation.take(memory_of(found.model_dump()))
        resolved.append(found)
    return resolved


def _stored(store: ResponseStore) -> APIRouter:
    routes = APIRouter(prefix="/v1/responses", tags=["completions"], responses=ERRORS)

    def missing(response_id: str) -> ApiError:
        return ApiError(404, not_stored("response", response_id), param="response_id")

    def find(response_id: str) -> StoredResponse:
        if (found := store.get(response_id)) is None:
            raise missing(response_id)
        return found

    @routes.get("/{response_id}", response_model=ResponseObject)
    async def response(response_id: str, request: Request, stream: bool = False) -> Response:
        """Return a stored response."""
        if stream:  # clients would silently read the JSON as an empty stream
            raise ApiError(
                400, "stream is not supported here: a stored response is complete; leave it out", param="stream"
            )
        found = find(response_id)
        request.state.reservation.take(len(found.response))  # held until the client has read it
        return Response(found.response, media_type="application/json")

    @routes.get("/{response_id}/input_items", response_model=InputItems)
    async def input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: Annotated[str | None, Query(description="The last id of the previous page.")] = None,
    ) -> Response:
        """List the input items of a stored response."""
        found = find(response_id)
        request.state.reservation.take(found.size)  # the page may have the whole input, with all images
        page = await asyncio.to_thread(page_of_input, found, response_id, limit, order, after)
        return Response(page, media_type="application/json")

    @routes.post("/{response_id}/cancel", response_model=ResponseObject)
    async def cancel(response_id: str) -> Response:
        """Always refused: stored responses are complete, since none is generated in the background."""
        find(response_id)
        raise ApiError(
            400, f"{response_id} is complete and cannot be cancelled; DELETE removes it", param="response_id"
        )

    @routes.delete("/{response_id}")
    async def delete(response_id: str) -> DeletedResponse:
        """Delete a stored response."""
        if not store.remove(response_id):
            raise missing(response_id)
        return DeletedResponse(id=response_id)

    return routes
