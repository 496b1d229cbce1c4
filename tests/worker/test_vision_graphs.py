"""The ViT on patches that are padded into fixed buffers, as CUDA graphs need them."""

import pytest
import torch

from mmvllm.worker import vision_graphs
from mmvllm.worker.mixed_graphs import MixedGraphs
from mmvllm.worker.vision_graphs import VisionGraphs
from tests.helpers.engine.engines import run_at_once
from tests.helpers.models.parity import REQUESTS, VIDEOS
from tests.helpers.models.shapes import IMAGE_SHAPES, every_family

pytestmark = pytest.mark.thinned

FEW_PATCHES_OF_WINDOWS = ("windows2-vit80-untied", "windows1-vit64-tied")


@pytest.mark.thinned(2)
@pytest.mark.parametrize("shape", IMAGE_SHAPES)
@torch.inference_mode()
def test_rows_are_those_of_the_eager_call(shape, checkpoints, make_llm, replayed):
    """Whatever a call leaves in the buffers, the next one gives its own rows."""
    runner = make_llm(checkpoints(shape)).engine.model_runner
    graphs, vision = runner.vision_graphs, runner.model_config.vision
    graphs._patches.fill_(1e4)
    for grids in ([(1, 16, 16)], [(1, 4, 6), (2, 8, 8), (1, 10, 6)], [(1, 4, 4)], [(1, 26, 30), (1, 4, 8)]):
        layout = runner.model.layout(grids)
        size = graphs.size(layout)
        if shape in FEW_PATCHES_OF_WINDOWS:
            assert size is None
            continue
        patches = torch.randn(sum(t * h * w for t, h, w in grids), vision.patch_dim)
        got, want = graphs.run(size, patches, layout), runner.model.encode(patches, grids)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@every_family
def test_images_and_videos_give_the_same_tokens(checkpoint, make_llm, replayed):
    options = {"max_num_seqs": 4, "enable_prefix_caching": False}
    eager, padded = make_llm(checkpoint, enforce_eager=True, **options), make_llm(checkpoint, **options)
    requests = [*REQUESTS.values(), *VIDEOS.values()]
    for _ in range(2):  # cold, then from the cache of rows
        assert run_at_once(padded, requests) == run_at_once(eager, requests)
    assert replayed[VisionGraphs] and replayed[MixedGraphs]


def test_a_call_takes_the_smallest_graph_with_room(checkpoint, make_llm, replayed):
    runner = make_llm(checkpoint).engine.model_runner

    def size(*grids: tuple[int, int, int]) -> int | None:
        return runner.vision_graphs.size(runner.model.layout(grids))

    assert size((1, 16, 16)) == 256 and size((1, 16, 18)) == 512
    assert size(*[(1, 4, 4)] * 7) == 256 and size(*[(1, 4, 4)] * 8) == 512, "one segment is for padding"
    assert size((1, 32, 64)) == 2048 and size((1, 34, 64)) is None
    assert size((128, 2, 2)) is None


def test_a_call_without_room_runs_eagerly(checkpoint, make_llm, replayed, monkeypatch):
    monkeypatch.setattr(vision_graphs, "NUM_PATCHES", (4,))
    requests = [REQUESTS["two"]]
    assert run_at_once(make_llm(checkpoint), requests) == run_at_once(
        make_llm(checkpoint, enforce_eager=True), requests
    )
    assert not replayed[VisionGraphs]


def test_a_text_model_has_no_graphs_of_a_vit(checkpoints, make_llm, replayed):
    assert make_llm(checkpoints("qwen2-gqa3-tied")).engine.model_runner.vision_graphs is None


def test_left_patches_form_segments_that_a_graph_has_room_for():
    assert vision_graphs._padded_lens([100, 60], 256, 256) == [100, 60, 96, 0, 0, 0, 0, 0]
    assert vision_graphs._padded_lens([64, 64], 256, 64) == [64, 64, 64, 64, 0, 0, 0, 0]
    assert vision_graphs._padded_lens([64, 30], 256, 64) == [64, 30, 64, 64, 34, 0, 0, 0]
    assert vision_graphs._padded_lens([16] * 8, 256, 256) == []
