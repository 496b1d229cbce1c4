"""Pooling parameters: how the hidden states of a prompt become one vector."""

from dataclasses import dataclass
from numbers import Integral

import numpy as np

from mmvllm.errors import ParameterError
from mmvllm.utils.arguments import with_checked_arguments

POOLINGS = ("last", "mean")


@with_checked_arguments({})
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How one request's vector is computed. Raises ValueError for an invalid value, TypeError for an unknown argument.

    Args:
        pooling: "last" takes the hidden state of the prompt's last token, "mean" the mean over all tokens; hidden
            states are the decoder's, after its last norm.
        normalize: divide the vector by its Euclidean norm.
        dimensions: keep only the first values, before normalizing; for models trained for this (arXiv 2205.13147).
    """

    pooling: str = "last"
    normalize: bool = True
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise ParameterError("pooling", self.pooling, " or ".join(map(repr, POOLINGS)))
        if self.normalize not in (True, False):
            raise ParameterError("normalize", self.normalize, "True or False")
        d = self.dimensions
        if d is not None and (isinstance(d, bool) or not isinstance(d, Integral) or d < 1):
            raise ParameterError("dimensions", d, "an integer of at least 1, or None")

    def check_dimensions(self, hidden_size: int) -> None:
        """Raise ParameterError for more dimensions than the model's hidden states have."""
        if self.dimensions is not None and self.dimensions > hidden_size:
            required = f"at most {hidden_size}, the hidden size of the model"
            raise ParameterError("dimensions", self.dimensions, required)

    def vector(self, total: np.ndarray, number: int) -> np.ndarray:
        """Return the vector (float32) for the sum (C,) float64 of `number` hidden states."""
        vector = (total / number)[: self.dimensions]
        norm = np.linalg.norm(vector)
        return (vector / norm if self.normalize and norm > 0 else vector).astype(np.float32)
