"""Tokens of prompts and texts of tokens, without a completion."""

from collections.abc import Awaitable, Callable

from mmvllm.entrypoints.async_llm import AsyncLLM, Request
from mmvllm.media.decoding import MediaDecoder
from mmvllm.server.errors import ApiError, engine_errors
from mmvllm.server.jobs import JobFactory, PromptJob
from mmvllm.server.limits import ByteReservation
from mmvllm.server.responses import DetokenizeResponse, InputTokens, TokenizeResponse
from mmvllm.server.responses_request import ResponsesRequest
from mmvllm.server.settings import ServerSettings
from mmvllm.server.tokens import DetokenizeRequest, TokenizeRequest


class TokenCounter:
    """Answers /tokenize, /detokenize and /v1/responses/input_tokens; raises ApiError for invalid requests."""

    def __init__(self, engine: AsyncLLM, settings: ServerSettings, decoder: MediaDecoder, jobs: JobFactory):
        self._engine, self._settings, self._decoder, self._jobs = engine, settings, decoder, jobs

    async def tokenize(self, body: TokenizeRequest, reservation: ByteReservation) -> TokenizeResponse:
        """The tokens that the engine would be given; what is fetched for them is counted in `reservation`."""
        prompt = await self._jobs.built(self._jobs.tokens, body, reservation)
        request = prompt.request if isinstance(prompt, PromptJob) else prompt
        ids = await self._tokenize(request, lambda error: (str(error), _param_of(prompt, error)))
        texts = self._engine.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        length = self._engine.max_model_len
        return TokenizeResponse(count=len(ids), max_model_len=length, tokens=ids, token_strs=texts)

    async def count_input(self, body: ResponsesRequest, reservation: ByteReservation) -> InputTokens:
        """The number of tokens of the prompt that a response would have."""
        job = await self._jobs.built(self._jobs.response, body, reservation)
        return InputTokens(input_tokens=len(await self._tokenize(job.prompt.request, job.spelled)))

    async def _tokenize(
        self, request: Request | Callable[[], Awaitable[Request]], spelled: Callable[[ValueError], tuple[str, str]]
    ) -> list[int]:
        with engine_errors(spelled), self._decoder.session() as load:
            return await self._engine.tokenize(request, timeout=self._settings.request_timeout, load=load)

    def detokenize(self, body: DetokenizeRequest) -> DetokenizeResponse:
        """The text of tokens, with that of special tokens."""
        self._jobs.check_model(body.model)
        tokenizer, most = self._engine.tokenizer, self._engine.max_model_len
        if len(body.tokens) > most:
            raise ApiError(
                400, f"{len(body.tokens)} tokens, at most {most} are accepted (max_model_len)", param="tokens"
            )
        for i, token_id in enumerate(body.tokens):
            if token_id >= len(tokenizer):
                message = f"tokens[{i}] is {token_id}, the tokenizer has {len(tokenizer)} tokens"
                raise ApiError(400, message, param=f"tokens[{i}]")
        return DetokenizeResponse(prompt=tokenizer.decode(body.tokens, clean_up_tokenization_spaces=False))


def _param_of(prompt: PromptJob | str, error: ValueError) -> str:
    return "prompt" if isinstance(prompt, str) else prompt.param_of(error) or "messages"
