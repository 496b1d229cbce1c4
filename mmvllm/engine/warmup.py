"""The first batch of an engine: kernels are compiled and memory is allocated before the first request."""

import logging
import time
from typing import TYPE_CHECKING

import torch

from mmvllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mmvllm.engine.llm_engine import LLMEngine

logger = logging.getLogger(__name__)


def warm_up(engine: "LLMEngine") -> float:
    """Run a prefill (with an image, if the model takes images) and a decode; return the seconds that it took."""
    start = time.perf_counter()
    tensors, token_ids = {}, [0] * max(1, min(16, engine.max_model_len - 2))
    rules = engine.media_rules
    if rules is not None and len(token_ids) >= 4 and engine.encoder_cache.fits(4):
        side = 2 * rules.merge_size
        tensors["pixel_values"] = torch.zeros(side * side, rules.patch_dim, dtype=torch.uint8)
        tensors["image_grid_thw"] = [(1, side, side)]
        token_ids[:4] = [rules.image_token_id] * 4
    prompt = engine.input_processor.engine_input(token_ids, **tensors)
    group = engine.add(prompt, SamplingParams(max_tokens=2, ignore_eos=True, seed=0), cache_salt="warm-up")
    while group.output is None:
        engine.step()
    if group.error is not None:
        raise RuntimeError(f"warm-up failed: {group.error}")
    seconds = time.perf_counter() - start
    logger.info("warm-up took %.2f s", seconds)
    return seconds
