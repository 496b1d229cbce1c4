"""The faster of two dtypes is measured."""

import pytest
import torch

from mmvllm.kernels.common import dispatch


@pytest.mark.parametrize(("in_bfloat16", "expected"), [(0.5, False), (1.0, False), (2.0, True)])
def test_single_slow_measurements_do_not_matter(in_bfloat16, expected, monkeypatch):
    delays = iter([0.0, 9.0, 9.0, 0.0, 5.0] * 4)

    def product_time(dtype: torch.dtype) -> float:
        return next(delays) + (1.0 if dtype == torch.float32 else in_bfloat16)

    monkeypatch.setattr(dispatch, "_product_time", product_time)
    threads = torch.get_num_threads()
    assert dispatch.multiplies_float32_faster.__wrapped__() is expected
    assert torch.get_num_threads() == threads
