"""Engines that launch steps ahead, and engines that pad steps as for CUDA graphs."""

from collections import defaultdict
from collections.abc import Callable

import pytest

from mmvllm.models.registry import load_config
from mmvllm.worker import loading
from mmvllm.worker.cuda_graphs import Graphs


@pytest.fixture
def make_pair(make_llm, checkpoint):
    """Make two LLMs with the same options: one as it is on a CPU, one that launches steps ahead.

    A GPU launches ahead. On the CPU a launched step is computed at once; the order of operations is the same.
    `encoder_cache_rows` is the size of the encoder cache in rows of the checkpoint, in float32.
    """

    def make(encoder_cache_rows=None, **options):
        if encoder_cache_rows is not None:
            options["encoder_cache_bytes"] = 4 * encoder_cache_rows * load_config(checkpoint).row_size
        options = {"kvcache_block_size": 4} | options
        return make_llm(checkpoint, **options), make_llm(checkpoint, async_scheduling=True, **options)

    return make


@pytest.fixture
def ahead(make_pair):
    return make_pair()[1]


@pytest.fixture
def replayed(monkeypatch) -> dict[type, list]:
    """Engines compute on the same buffers what a graph would replay; the sizes of these, by class, as they come."""
    sizes = defaultdict(list)

    def capture(graphs: Graphs, compute: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            sizes[type(compute.func.__self__)].append(*compute.args)
            compute()

        compute()
        return replay

    monkeypatch.setattr(Graphs, "capture", capture)
    monkeypatch.setattr(loading, "_uses_graphs", lambda config, device, attention: not config.enforce_eager)
    return sizes
