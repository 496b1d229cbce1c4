"""A model of each family, trained for a few steps by the example, answers through mmvllm with transformers' logits."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.helpers.models.reference import Reference, first_logits

ROOT = Path(__file__).resolve().parents[2]
QUESTION = {"type": "text", "text": "Describe the image."}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_from_training_to_an_answer(family, tmp_path, make_llm):
    script = [sys.executable, str(ROOT / "examples" / "train_demo_model.py")]
    options = ["--family", family, "--output", str(tmp_path), "--steps", "3", "--batch-size", "2", "--device", "cpu"]
    done = subprocess.run([*script, *options], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    reference, llm = Reference(tmp_path), make_llm(tmp_path)
    image = Image.open(ROOT / "examples" / "images" / "scene-01.png").convert("RGB")
    request = {"messages": [{"role": "user", "content": [{"type": "image", "image": image}, QUESTION]}]}
    inputs = reference.inputs(request)
    torch.testing.assert_close(first_logits(llm.engine, inputs), reference.logits(inputs), rtol=1e-4, atol=1e-4)
    output = llm.generate_multimodal([request], {"temperature": 0, "max_tokens": 8}, use_tqdm=False)[0]
    assert output.token_ids == reference.generate(request, max_tokens=8)[: len(output.token_ids)]
    assert output.token_ids and 25 <= output.num_image_tokens <= 49
