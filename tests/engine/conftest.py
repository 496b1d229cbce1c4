"""Engines that launch steps ahead."""

import pytest


@pytest.fixture
def make_pair(make_llm, checkpoint):
    """Make two LLMs with the same options: one as it is on a CPU, one that launches steps ahead.

    A GPU launches ahead. On the CPU a launched step is computed at once; the order of operations is the same.
    """

    def make(**options):
        plain, ahead = (make_llm(checkpoint, **{"kvcache_block_size": 4} | options) for _ in range(2))
        ahead.engine._launches_ahead = True
        return plain, ahead

    return make


@pytest.fixture
def ahead(make_pair):
    return make_pair()[1]
