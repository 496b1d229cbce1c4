"""Patches of the items of a step, copied and normalized together: each with its modality's values."""

import torch

from mmvllm.inputs import MultiModalItem, PlaceholderRange
from mmvllm.worker import model_runner
from tests.helpers.media.images import normalized


def item(patches: torch.Tensor, modality: str = "image") -> MultiModalItem:
    return MultiModalItem(modality, patches, (1, 2, len(patches) // 2), b"", PlaceholderRange(0, 1))


def test_runs_of_equal_items_are_normalized_at_once_and_the_order_is_kept(checkpoint, make_llm, monkeypatch):
    engine = make_llm(checkpoint).engine
    width, calls = engine.media_rules.patch_dim, []
    torch.manual_seed(0)
    levels = [torch.randint(0, 256, (4 * n, width), dtype=torch.uint8) for n in range(1, 6)]
    values = [torch.randn(4, width, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    items = [item(levels[0]), item(levels[1]), item(levels[2], "video"), item(levels[3], "video"), item(levels[4])]
    items += [item(values[0]), item(values[1])]
    real = model_runner.normalize
    monkeypatch.setattr(model_runner, "normalize", lambda x, table: calls.append(len(x)) or real(x, table))
    want = [normalized(x, engine.image_config) for x in levels]
    want[2:4] = [normalized(x, engine.video_config) for x in levels[2:4]]
    got = engine.model_runner._pixels(items)
    assert torch.equal(got, torch.cat([*want, *values]).float())
    assert calls == [4 + 8, 12 + 16, 20]


def test_tables_are_made_once_and_in_the_models_dtype(checkpoint, make_llm, monkeypatch):
    runner = make_llm(checkpoint, dtype="bfloat16").engine.model_runner
    monkeypatch.setattr("mmvllm.processors.images.processor.ImageProcessorConfig.pixel_table", None)
    patches = torch.full((4, runner.model_config.vision.patch_dim), 200, dtype=torch.uint8)
    assert runner._pixels([item(patches)]).dtype == torch.bfloat16
