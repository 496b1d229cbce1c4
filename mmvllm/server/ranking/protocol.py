"""Pydantic models of /rerank and /score: texts compared by the cosine similarity of their embeddings."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from mmvllm.server.common.messages import INT64, Ignored, StrictModel, Unsupported
from mmvllm.server.common.protocol import (
    MAX_INPUTS,
    PRIORITY,
    TRUNCATION,
    TRUNCATION_SIDE,
    Priority,
    ServedModel,
    TokenLimit,
    TruncationSide,
)
from mmvllm.server.common.response_models import OMITTED, Usage
from mmvllm.server.errors import ApiError

# The names of the two sides of /score.
FIRST, SECOND = ("queries", "text_1", "data_1"), ("documents", "items", "text_2", "data_2")


def _text_of(given: Any) -> Any:
    if isinstance(given, dict):
        if given.keys() != {"text"}:
            raise PydanticCustomError("text", 'must be a string, or {"text": "..."} and nothing else')
        return given["text"]
    return given


def _as_list(given: Any) -> Any:
    return given if isinstance(given, list) else [given]


Text = Annotated[str, Field(min_length=1, description='A string, or {"text": "..."}.'), BeforeValidator(_text_of)]
Texts = Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
OneOrSeveral = Annotated[Texts, BeforeValidator(_as_list)]


class TextsRequest(StrictModel):
    """The fields that /rerank and /score share."""

    model: str | None = ServedModel
    pooling: Literal["last", "mean"] | None = Field(None, description="As for /v1/embeddings.")
    priority: Priority | None = Field(None, description=PRIORITY)
    truncate_prompt_tokens: TokenLimit | None = Field(None, description=TRUNCATION)
    truncation_side: TruncationSide | None = TRUNCATION_SIDE
    instruction: Unsupported = None
    max_tokens_per_query: Unsupported = None
    max_tokens_per_doc: Unsupported = None
    use_activation: Ignored = None  # vectors are normalized in any case
    user: Ignored = None
    request_id: Ignored = None
    add_special_tokens: Ignored = None


class RerankRequest(TextsRequest):
    """POST /rerank, in the form of Cohere, Jina and vLLM"""

    query: Text
    documents: Texts
    top_n: int | None = Field(None, ge=0, lt=INT64, description="Documents to return. Default, and 0: all.")
    return_documents: bool | None = Field(None, description="Return the text of each document. Default: true.")
    rank_fields: Unsupported = None
    max_chunks_per_doc: Unsupported = None

    def sides(self) -> list[tuple[str, list[str]]]:
        """Return the two fields that are compared, with their texts."""
        return [("query", [self.query]), ("documents", self.documents)]


class ScoreRequest(TextsRequest):
    """POST /score, in vLLM's form: one of `queries`, `text_1` and `data_1` is compared with another field."""

    queries: OneOrSeveral | None = None
    text_1: OneOrSeveral | None = None
    data_1: OneOrSeveral | None = None
    documents: OneOrSeveral | None = None
    items: OneOrSeveral | None = None
    text_2: OneOrSeveral | None = None
    data_2: OneOrSeveral | None = None

    def sides(self) -> list[tuple[str, list[str]]]:
        """Return the two fields that are compared, with their texts: one in the first, or as many as in the second.

        Raises ApiError for other numbers of texts, and unless each side has one field.
        """
        (first, queries), (second, documents) = sides = [self._given(FIRST), self._given(SECOND)]
        if len(queries) not in (1, len(documents)):
            message = f"{first} must have one text or as many as {second}, {len(documents)}, got {len(queries)}"
            raise ApiError(400, message, param=first)
        return sides

    def _given(self, names: Sequence[str]) -> tuple[str, list[str]]:
        given = [(name, texts) for name in names if (texts := getattr(self, name)) is not None]
        if len(given) != 1:
            raise ApiError(400, f"give one of {', '.join(names)}; got {len(given)} of them", param=names[0])
        return given[0]


class RankedDocument(BaseModel):
    text: str


class RankedResult(BaseModel):
    index: int
    relevance_score: float
    document: Annotated[RankedDocument | None, OMITTED]


class RerankResponse(BaseModel):
    id: str
    model: str
    results: list[RankedResult]  # the most similar document first
    usage: Usage


class Score(BaseModel):
    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreResponse(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: Usage
