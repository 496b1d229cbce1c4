"""Builds the responses of /v1/embeddings and /pooling."""

import base64
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mmvllm.outputs import Delta
from mmvllm.server.common.response_builder import ChoiceBuffer
from mmvllm.server.common.response_models import Usage
from mmvllm.server.embeddings.protocol import EmbeddingList, PooledList
from mmvllm.server.errors import ApiError

Vector = list[float] | str  # base64

MAX_NUMBERS = 2**22  # elements of all vectors of a response, 80 MB as JSON


@dataclass(frozen=True, slots=True)
class VectorEncoding:
    """How the elements of a vector are encoded as bytes.

    Args:
        dtype: "float32", "float16" or "bfloat16".
        byte_order: "little", "big" or "native".
    """

    dtype: str
    byte_order: str

    def bytes_of(self, vector: np.ndarray) -> bytes:
        """Return the bytes of a float32 vector."""
        if self.dtype == "bfloat16":  # numpy has no bfloat16
            bits = torch.from_numpy(vector).bfloat16().view(torch.int16).numpy()
        else:
            bits = vector.astype(self.dtype)
        return bits.astype(bits.dtype.newbyteorder(self.byte_order)).tobytes()


class EmbeddingResponseBuilder:
    """Builds the response to one request of /v1/embeddings, which is not streamed.

    Args:
        prompt_field: the request field with the inputs.
        encoding: the encoding of vectors in base64; None returns lists of numbers.
    """

    id_prefix = "embd"

    def __init__(self, model: str, prompt_field: str, encoding: VectorEncoding | None):
        self.id, self.model, self.prompt_field = f"{self.id_prefix}-{uuid.uuid4().hex}", model, prompt_field
        self._encoding, self.num_values = encoding, 0

    def count(self, delta: Delta, _is_streamed: bool) -> None:
        """Add the size of a vector to `num_values`; raises ApiError above `MAX_NUMBERS`, except in base64."""
        if delta.output is not None:
            self.num_values += delta.output.embedding.size
            if self.num_values > MAX_NUMBERS and self._encoding is None:
                message = f"the vectors of a response may have at most {MAX_NUMBERS} numbers"
                message = f'{message}; give fewer inputs, or encoding_format "base64"'
                raise ApiError(400, message, param=self.prompt_field)

    def whole(self, choices: Sequence[ChoiceBuffer], usage: Usage) -> EmbeddingList | PooledList:
        """Return the response, with a vector for each input."""
        vectors = {choice.index: self._encoded(choice.output.embedding) for choice in choices}
        return self._list(vectors, {"id": self.id, "created": int(time.time()), "model": self.model, "usage": usage})

    def _list(self, vectors: Mapping[int, Vector], head: Mapping[str, Any]) -> EmbeddingList | PooledList:
        return EmbeddingList(data=[{"index": i, "embedding": one} for i, one in vectors.items()], **head)

    def _encoded(self, vector: np.ndarray) -> Vector:
        return vector.tolist() if self._encoding is None else base64.b64encode(self._encoding.bytes_of(vector)).decode()


class PoolingResponseBuilder(EmbeddingResponseBuilder):
    """Builds the response to one request of /pooling: the vectors of /v1/embeddings under vLLM's names."""

    id_prefix = "pool"

    def _list(self, vectors: Mapping[int, Vector], head: Mapping[str, Any]) -> PooledList:
        return PooledList(data=[{"index": i, "data": one} for i, one in vectors.items()], **head)
