"""Builds the responses of /rerank and /score."""

import time
import uuid
from collections.abc import Sequence

import numpy as np

from mmvllm.outputs import Delta
from mmvllm.server.common.response_builder import ChoiceBuffer
from mmvllm.server.common.response_models import Usage
from mmvllm.server.ranking.protocol import (
    RankedResult,
    RerankRequest,
    RerankResponse,
    Score,
    ScoreRequest,
    ScoreResponse,
)


class RankingResponseBuilder:
    """Builds the response to one request of /rerank or /score; its prompts are the queries, then the documents."""

    def __init__(self, model: str, body: RerankRequest | ScoreRequest, num_queries: int, prompt_field: str):
        self.id = f"{'rerank' if isinstance(body, RerankRequest) else 'score'}-{uuid.uuid4().hex}"
        self.model, self.prompt_field, self.num_values = model, prompt_field, 0
        self._body, self._num_queries = body, num_queries

    def count(self, delta: Delta, _is_streamed: bool) -> None:
        """Add the size of a vector to `num_values`."""
        if delta.output is not None:
            self.num_values += delta.output.embedding.size

    def whole(self, choices: Sequence[ChoiceBuffer], usage: Usage) -> RerankResponse | ScoreResponse:
        """Return the response, with the similarity of each pair."""
        vectors = np.stack([choice.output.embedding for choice in choices])  # of length 1
        queries, documents = np.split(vectors, [self._num_queries])
        scores = (queries * documents).sum(axis=1).tolist()
        if isinstance(self._body, RerankRequest):
            return RerankResponse(id=self.id, model=self.model, results=self._results(scores, self._body), usage=usage)
        data = [Score(index=i, score=score) for i, score in enumerate(scores)]
        return ScoreResponse(id=self.id, created=int(time.time()), model=self.model, data=data, usage=usage)

    def _results(self, scores: Sequence[float], body: RerankRequest) -> list[RankedResult]:
        most_similar = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[: body.top_n or None]
        shown = {} if body.return_documents is False else {i: {"text": body.documents[i]} for i in most_similar}
        return [RankedResult(index=i, relevance_score=scores[i], document=shown.get(i)) for i in most_similar]
