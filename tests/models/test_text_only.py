"""Text-only checkpoints generate the tokens of transformers and refuse images."""

import shutil

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from mmvllm import SamplingParams
from mmvllm.models.folder import BUNDLED
from tests.helpers.requests import ask, noise_image

GREEDY = SamplingParams(max_tokens=32, ignore_eos=True)
PROMPTS = [[5, 9, 200, 31], [700], list(range(40, 77))]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def text_only(request, tmp_path_factory):
    """A text-only checkpoint saved by transformers, and its model in transformers."""
    torch.manual_seed(11)
    config = Qwen2Config(
        vocab_size=768,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=request.param,
        eos_token_id=504,
    )
    model = Qwen2ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    folder = tmp_path_factory.mktemp("text-only")
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, folder)
    return folder, model


def test_text_only_checkpoint_generates_the_tokens_of_transformers(text_only, make_llm):
    folder, model = text_only
    outputs = make_llm(folder).generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        want = model.generate(
            torch.tensor([prompt]), max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert output.token_ids == want[0, len(prompt) :].tolist()
        assert len(set(output.token_ids)) > 4  # not one token repeated


def test_text_only_checkpoint_takes_chats_and_refuses_images(text_only, make_llm):
    llm = make_llm(text_only[0], skip_warmup=False)
    (output,) = llm.generate_multimodal([ask("Hello")], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(output.token_ids) == 3
    with pytest.raises(ValueError, match="request 0: this checkpoint is text-only, it cannot take images"):
        llm.generate_multimodal([ask(noise_image(64, 64), "What?")])
    refused, fine = llm.generate_multimodal(
        [ask(noise_image(64, 64), "What?"), ask("Hello")],
        SamplingParams(max_tokens=3, ignore_eos=True),
        on_error="return",
    )
    assert "text-only" in refused.error and fine.token_ids == output.token_ids
