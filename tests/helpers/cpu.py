"""Markers of tests that need products which not every CPU has: elsewhere they are skipped, with the reason."""

from collections.abc import Iterable

import pytest
import torch

from mmvllm.models.quant_methods import packs_well, sums_8_bits

PACKS_BFLOAT16, SUMS_8_BITS = packs_well(torch.bfloat16), sums_8_bits()
NEEDS_BFLOAT16 = pytest.mark.skipif(not PACKS_BFLOAT16, reason="oneDNN multiplies no bfloat16 on this CPU")
NEEDS_8_BITS = pytest.mark.skipif(not SUMS_8_BITS, reason="oneDNN adds 8-bit products in 16 bits on this CPU")


def kinds(names: Iterable[str | None]) -> list:
    """Kinds of quantization, or names that begin with them, as parameters of a test, each with what it needs."""
    return [pytest.param(name, marks=NEEDS_8_BITS) if (name or "").startswith("int") else name for name in names]
