"""Builds OpenAI's response to a request for embeddings."""

import base64
import time
import uuid
from collections.abc import Sequence

import numpy as np

from mmvllm.server.response_builder import ChoiceBuffer
from mmvllm.server.responses import EmbeddingList, Usage


class EmbeddingResponseBuilder:
    """Responses of /v1/embeddings, which are not streamed.

    Args:
        prompt_field: of the request.
        in_base64: vectors are the bytes of little-endian float32 values, in base64.
    """

    def __init__(self, model: str, prompt_field: str, in_base64: bool):
        self.id, self.model, self.prompt_field = f"embd-{uuid.uuid4().hex}", model, prompt_field
        self._in_base64 = in_base64

    def whole(self, choices: Sequence[ChoiceBuffer], usage: Usage) -> EmbeddingList:
        """The response, with a vector for each input."""
        return EmbeddingList(
            id=self.id,
            created=int(time.time()),
            model=self.model,
            data=[{"index": choice.index, "embedding": self._encoded(choice.output.embedding)} for choice in choices],
            usage=usage,
        )

    def _encoded(self, vector: np.ndarray) -> str | list[float]:
        if self._in_base64:
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return vector.tolist()
