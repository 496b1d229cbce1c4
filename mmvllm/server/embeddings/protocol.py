"""Pydantic models of /v1/embeddings and /pooling."""

from typing import Annotated, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from mmvllm.server.common.messages import INT64, Ignored
from mmvllm.server.common.protocol import (
    MAX_INPUTS,
    PRIORITY,
    TRUNCATION,
    TRUNCATION_SIDE,
    ChatPrompt,
    Messages,
    Priority,
    PromptTokenIds,
    ServedModel,
    TokenLimit,
    TruncationSide,
    prompt_tag,
)
from mmvllm.server.common.response_models import Usage


class EmbeddingRequest(ChatPrompt):
    """POST /v1/embeddings, with `input`, or as in vLLM with one conversation in `messages`"""

    model: str | None = ServedModel
    input: (
        Annotated[
            Annotated[str, Tag("a string")]
            | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS), Tag("strings")]
            | Annotated[PromptTokenIds, Tag("token ids")]
            | Annotated[
                list[PromptTokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS), Tag("lists of ids")
            ],
            Discriminator(prompt_tag),
        ]
        | None
    ) = None
    messages: Messages | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, lt=INT64, description="Number of first values of the vector to keep.")
    pooling: Literal["last", "mean"] | None = Field(
        None, description="The hidden state of the last token (default), or the mean over all tokens."
    )
    normalize: bool | None = Field(None, description="Divide the vector by its length; true by default.")
    use_activation: bool | None = Field(None, description="vLLM's name of normalize, used if normalize is null.")
    embed_dtype: Literal["float32", "float16", "bfloat16"] | None = Field(
        None, description="Dtype of the values in base64; float32 by default."
    )
    endianness: Literal["native", "little", "big"] | None = Field(
        None, description="Byte order of the values in base64; little by default."
    )
    user: Ignored = None
    request_id: Ignored = None
    add_special_tokens: Ignored = None
    priority: Priority | None = Field(None, description=PRIORITY)
    truncate_prompt_tokens: TokenLimit | None = Field(None, description=TRUNCATION)
    truncation_side: TruncationSide | None = TRUNCATION_SIDE


class PoolingRequest(EmbeddingRequest):
    """POST /pooling, with the fields of /v1/embeddings"""

    task: Literal["embed"] | None = None


class _VectorList(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: Usage


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str  # base64


class EmbeddingList(_VectorList):
    data: list[Embedding]


class PooledVector(BaseModel):
    object: Literal["pooling"] = "pooling"
    index: int
    data: list[float] | str  # base64


class PooledList(_VectorList):
    data: list[PooledVector]
