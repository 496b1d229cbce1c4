"""transformers runs the same requests, with the same results."""

import json

import pytest
import torch
import transformers
from transformers import AutoConfig

from mmvllm.bench.reference import Transformers, dummy_model
from mmvllm.bench.runs import Mmvllm
from mmvllm.bench.workload import Workload
from mmvllm.models.folder import BUNDLED
from tests.helpers.models.shapes import RICHEST, SHAPES

CPU, FLOAT32 = torch.device("cpu"), torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("shape", [None, *RICHEST], ids=lambda shape: shape or "bundled")
def test_both_engines_generate_the_same_tokens(shape, make_llm, checkpoints):
    """In left-padded batches with and without images, and one of text only; no completion ends early."""
    folder = checkpoints(shape) if shape else BUNDLED
    llm = make_llm(folder)
    theirs = Transformers(folder, llm.tokenizer, CPU, FLOAT32, "auto", batch_size=3)
    sizes = [(90, 64), (60, 133), (200, 77)]
    requests = Workload(llm.tokenizer, sizes=sizes, prompt_tokens=9, text_share=0.4).requests(6)
    requests += Workload(llm.tokenizer, sizes=sizes, prompt_tokens=20, text_share=1.0, seed=1).requests(3)
    ours = sorted(Mmvllm(llm).run(requests, 12).outputs, key=lambda output: int(output.request_id.split("-")[1]))
    expected = theirs.run(requests, 12).outputs
    for name in ("token_ids", "num_prompt_tokens", "num_image_tokens"):
        assert [getattr(output, name) for output in expected] == [getattr(output, name) for output in ours]
    assert all(output.arrival_time <= output.first_token_time <= output.finish_time for output in expected)


def test_text_only_checkpoints(checkpoint, tmp_path, make_llm):
    """With random weights, only counts can be compared."""
    raw = json.loads((checkpoint / "config.json").read_text())["text_config"]
    raw |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True}
    raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((BUNDLED / name).read_bytes())
    llm = make_llm(tmp_path, load_format="dummy")
    requests = Workload(llm.tokenizer, sizes=[], prompt_tokens=20, text_share=1.0).requests(3)
    theirs = Transformers(tmp_path, llm.tokenizer, CPU, FLOAT32, "dummy", batch_size=2).run(requests, 5)
    ours = Mmvllm(llm).run(requests, 5)
    assert [len(output.token_ids) for output in theirs.outputs] == [5, 5, 5]
    lengths = [[output.num_prompt_tokens for output in run.outputs] for run in (ours, theirs)]
    assert lengths[0] == lengths[1] and all(not output.num_image_tokens for output in theirs.outputs)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("shape", [*RICHEST, "gqa3-untied", "qwen3-mqa-untied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dummy_model_differs_from_a_real_one_only_in_weights(shape, dtype, checkpoints):
    config = AutoConfig.from_pretrained(checkpoints(shape))
    model_class = getattr(transformers, config.architectures[0])
    dummy = dummy_model(model_class, config, CPU, dtype)
    real = model_class.from_pretrained(checkpoints(shape), dtype=dtype)
    buffers = dict(dummy.named_buffers())
    assert buffers.keys() == dict(real.named_buffers()).keys()
    assert all(torch.equal(buffers[name], buffer) for name, buffer in real.named_buffers())
    shapes = {name: (parameter.shape, parameter.dtype) for name, parameter in dummy.named_parameters()}
    assert shapes == {name: (parameter.shape, parameter.dtype) for name, parameter in real.named_parameters()}
    tied = dummy.lm_head.weight is dummy.get_input_embeddings().weight
    assert tied == config.tie_word_embeddings == SHAPES[shape]["tied"]
    assert 0.01 < dummy.lm_head.weight.float().std() < 0.03
    assert not dummy.training and dummy.config._attn_implementation == "sdpa"
