"""Serves /tokenize, /detokenize and /tokenizer_info, which convert prompts to tokens and tokens to text."""

import json
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from transformers import AddedToken, PreTrainedTokenizerBase

from mmvllm.server.common.prompts import PromptJob
from mmvllm.server.common.response_models import ERRORS
from mmvllm.server.common.serving import Serving
from mmvllm.server.common.tools import prompt_tools
from mmvllm.server.disconnects import while_connected
from mmvllm.server.errors import ApiError
from mmvllm.server.http.auth_and_limits import ByteReservation
from mmvllm.server.tokenize.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChat,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)

_OF_ADDED = ("content", "lstrip", "rstrip", "single_word", "normalized", "special")


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(route_class=serving.route_class, tags=["tokens"], responses=ERRORS)

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> TokenizeResponse:
        """Return the tokens of a text, or of a conversation with all tokens of its images and videos."""
        return await while_connected(request.receive, tokens_of(serving, body, request.state.reservation))

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> DetokenizeResponse:
        """Return the text of tokens."""
        return DetokenizeResponse(prompt=_text_of(serving, body))

    if serving.settings.enable_tokenizer_info_endpoint:

        @routes.get("/tokenizer_info")
        async def tokenizer_info() -> TokenizerInfo:
            """Return the tokenizer's configuration and the chat template."""
            return _info_of(serving.engine.tokenizer)

    return routes


async def tokens_of(serving: Serving, body: TokenizeRequest, reservation: ByteReservation) -> TokenizeResponse:
    """Return the prompt tokens that the engine would process; `reservation` counts the media that are fetched."""
    prompt = await serving.built(partial(_prompt_of, serving), body, reservation)
    request = prompt.request if isinstance(prompt, PromptJob) else prompt
    ids = await serving.tokenize(request, lambda error: (str(error), _param_of(prompt, error)))
    texts = serving.engine.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
    length = serving.engine.max_model_len
    return TokenizeResponse(count=len(ids), max_model_len=length, tokens=ids, token_strs=texts)


def _prompt_of(serving: Serving, body: TokenizeRequest, reservation: ByteReservation) -> PromptJob | str:
    serving.models.find(body.model)
    if isinstance(body, TokenizeChat):
        return serving.prompts.of_conversation(body, prompt_tools(body.tools), reservation)
    serving.prompts.check_lengths("prompt", [body.prompt])
    return body.prompt


def _param_of(prompt: PromptJob | str, error: ValueError) -> str:
    return "prompt" if isinstance(prompt, str) else prompt.param_of(error) or "messages"


def _text_of(serving: Serving, body: DetokenizeRequest) -> str:
    """Return the text of tokens, including special tokens."""
    serving.models.find(body.model)
    tokenizer, most = serving.engine.tokenizer, serving.engine.max_model_len
    if len(body.tokens) > most:
        raise ApiError(400, f"{len(body.tokens)} tokens; at most {most} are accepted (max_model_len)", param="tokens")
    for i, token_id in enumerate(body.tokens):
        if token_id >= len(tokenizer):
            message = f"tokens[{i}] is {token_id}, but the tokenizer has {len(tokenizer)} tokens"
            raise ApiError(400, message, param=f"tokens[{i}]")
    return tokenizer.decode(body.tokens, clean_up_tokenization_spaces=False)


def _info_of(tokenizer: PreTrainedTokenizerBase) -> TokenizerInfo:
    """Return the tokenizer's class, configuration and chat template, without the paths of its files."""
    kept = {name: value for name, value in tokenizer.init_kwargs.items() if not name.endswith(("_file", "_path"))}
    config = json.loads(json.dumps(kept, default=_plain))
    own = {"tokenizer_class": type(tokenizer).__name__, "chat_template": tokenizer.chat_template}
    return TokenizerInfo(**config | tokenizer.special_tokens_map | own)


def _plain(value: Any) -> Any:
    """Convert an added token to an object, and any other value that JSON lacks to text."""
    return {name: getattr(value, name) for name in _OF_ADDED} if isinstance(value, AddedToken) else str(value)
