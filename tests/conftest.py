"""Small random checkpoints, pictures of odd sizes, and transformers as the reference."""

import json
import os
import shutil
import time
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported, which transformers does too
from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mmvllm import LLM, AsyncLLM
from mmvllm.models.weights import BUNDLED

# The models are tiny: a second thread only waits for the first, and badly so on a busy machine.
torch.set_num_threads(1)

SMALL_PIXELS = {"min_pixels": 56 * 56, "max_pixels": 140 * 140}

# Shapes that differ where code goes wrong: the ratio of query to KV heads, odd depths, tied and untied heads, sections.
SHAPES = {
    "gqa2-tied": {"heads": 4, "kv_heads": 2, "layers": 2, "depth": 3, "section": [2, 3, 3], "tied": True},
    "gqa3-untied": {"heads": 6, "kv_heads": 2, "layers": 3, "depth": 1, "section": [4, 2, 2], "tied": False},
    "mha-untied": {"heads": 2, "kv_heads": 2, "layers": 1, "depth": 2, "section": [2, 2, 4], "tied": False},
    "mqa-tied": {"heads": 5, "kv_heads": 1, "layers": 5, "depth": 2, "section": [3, 3, 2], "tied": True},
}


def make_checkpoint(folder: Path, shape: str) -> Path:
    """Save a random Qwen2-VL with the bundled tokenizer, through transformers."""
    torch.manual_seed(sum(map(ord, shape)))
    s, special = SHAPES[shape], json.loads((BUNDLED / "config.json").read_text())
    width = 16 * s["heads"]
    config = Qwen2VLConfig(
        vision_config={"depth": s["depth"], "embed_dim": 48, "num_heads": 3, "mlp_ratio": 2, "hidden_size": width},
        text_config={
            "vocab_size": 768,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": s["layers"],
            "num_attention_heads": s["heads"],
            "num_key_value_heads": s["kv_heads"],
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": s["section"]},
            "eos_token_id": special["text_config"]["eos_token_id"],
        },
        tie_word_embeddings=s["tied"],
        **{key: special[key] for key in special if key.endswith("_token_id")},
    )
    model = Qwen2VLForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        # Wide enough that logits differ and answers are not one token repeated.
        parameter.data.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.15)
    model.generation_config.eos_token_id = config.text_config.eos_token_id
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, folder / name)
    (folder / "preprocessor_config.json").write_text(json.dumps({**SMALL_PIXELS, "patch_size": 14, "merge_size": 2}))
    return folder


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Folder of a random checkpoint by the name of its shape, made on first use."""
    made = {}

    def folder(shape: str) -> Path:
        if shape not in made:
            made[shape] = make_checkpoint(tmp_path_factory.mktemp(shape), shape)
        return made[shape]

    return folder


@pytest.fixture(scope="session")
def checkpoint(checkpoints) -> Path:
    return checkpoints("gqa2-tied")


@pytest.fixture
def make_llm():
    """LLM(...) that exits after the test."""
    made = []

    def make(model, **engine_args) -> LLM:
        engine_args = {
            "dtype": "float32",
            "device": "cpu",
            "num_kvcache_blocks": 256,
            "skip_warmup": True,
        } | engine_args
        made.append(LLM(model, **engine_args))
        return made[-1]

    yield make
    for llm in made:
        llm.exit()


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of smooth noise, different for every seed."""
    noise = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def ask(*parts, **keys) -> dict:
    """A request with one user turn of strings and pictures, in that order."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return {"messages": [{"role": "user", "content": content}], **keys}


def unhurried(engine: AsyncLLM) -> AsyncLLM:
    """Make every step last 10 ms at least, and a long answer as many seconds as a test needs to look at it."""
    real = engine._llm.engine.step

    def step():
        time.sleep(0.01)
        return real()

    engine._llm.engine.step = step
    return engine


class Reference:
    """transformers' own tokenizer, picture processor and model, in float32, one request at a time."""

    def __init__(self, folder: Path):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.images = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self.model = Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.image_token_id = self.model.config.image_token_id

    def inputs(self, request: dict) -> dict:
        """What transformers' Qwen2VLProcessor returns (it cannot be built itself without torchvision)."""
        pictures = [part["image"] for m in request["messages"] for part in m["content"] if "image" in part]
        text = self.tokenizer.apply_chat_template(request["messages"], tokenize=False, add_generation_prompt=True)
        made = dict(self.images(pictures, return_tensors="pt")) if pictures else {}
        for grid in made.get("image_grid_thw", []):
            text = text.replace("<|image_pad|>", "<|placeholder|>" * (prod(grid.tolist()) // 4), 1)
        made["input_ids"] = self.tokenizer(
            text.replace("<|placeholder|>", "<|image_pad|>"), return_tensors="pt", add_special_tokens=False
        )["input_ids"]
        made["mm_token_type_ids"] = (made["input_ids"] == self.image_token_id).int()
        return made

    @torch.inference_mode()
    def generate(self, request: dict, max_tokens: int = 32) -> list[int]:
        """Greedy tokens, past any end-of-sequence token."""
        inputs = self.inputs(request)
        self.model.model.rope_deltas = None
        out = self.model.generate(
            **inputs,
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            attention_mask=torch.ones_like(inputs["input_ids"]),
            pad_token_id=0,
        )
        return out[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.fixture(scope="session")
def reference(checkpoints):
    """`Reference` by the name of a shape, or of the bundled checkpoint for None."""
    made = {}

    def get(shape: str | None) -> Reference:
        if shape not in made:
            made[shape] = Reference(BUNDLED if shape is None else checkpoints(shape))
        return made[shape]

    return get


@pytest.fixture(scope="module")  # no longer: its driver keeps an event loop in the thread of the tests
def chromium():
    """Debian's browser without a window, with a camera that films a test card."""
    sync_api = pytest.importorskip("playwright.sync_api")
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("there is no chromium")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
    flags += ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=flags, headless=True)
        yield browser
        browser.close()
