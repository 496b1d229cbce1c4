"""Metrics of runs that are written out by hand."""

import pytest
import torch
from torch import nn

from mmvllm.bench import measures, roofline
from mmvllm.bench.costs import ModelCosts
from mmvllm.bench.roofline import Machine, Roofline, StoredBytes
from mmvllm.bench.runs import Run
from mmvllm.engine.stats import StepStats
from mmvllm.layers.linear import Linear
from mmvllm.outputs import CompletionOutput, RequestOutput
from mmvllm.quantization.fp8 import Fp8Linear
from mmvllm.quantization.onednn import Int8Linear, OneDNNLinear
from mmvllm.quantization.wna16 import W4A16Linear
from tests.helpers.cpu import NEEDS_BFLOAT16, kinds


def step(end: float, prefill: int, decode: int, images: int = 0, running: int = 1, **seconds: float) -> StepStats:
    return StepStats(end, seconds, prefill, decode, images, 0, 16 * images, running, num_waiting=0, num_used_blocks=3)


def output(arrival: float, first: float, last: float, prompt: int = 10, num_tokens: int = 3, image: int = 4):
    completion = CompletionOutput("", [7] * num_tokens, "length")
    times = {"arrival_time": arrival, "first_token_time": first, "finish_time": last}
    return RequestOutput("", [completion], num_prompt_tokens=prompt, num_image_tokens=image, **times)


@pytest.fixture
def run() -> Run:
    """Two requests, the second of which is prepared after the first has finished."""
    steps = [
        step(102.0, 10, 0, images=1, schedule=0.1, pack=0.0, vision=0.4, decoder=0.3, sample=0.1, commit=0.1),
        step(103.0, 0, 1, schedule=0.1, pack=0.05, decoder=0.7, sample=0.1, commit=0.05),
        step(104.0, 0, 1, running=0, schedule=0.1, pack=0.05, decoder=0.7, sample=0.1, commit=0.05),
        step(107.0, 10, 0, images=1, schedule=0.1, pack=0.0, vision=0.4, decoder=0.3, sample=0.1, commit=0.1),
        step(108.0, 0, 2, running=0, schedule=0.1, pack=0.05, decoder=0.7, sample=0.1, commit=0.05),
    ]
    outputs = [output(1001.0, 1002.0, 1004.0), output(1006.0, 1007.0, 1008.0, num_tokens=2, image=0)]
    return Run(1000.0, 100.0, 9.0, outputs, 5, steps, grids=[(1, 4, 4)], encoder_lookups=4, encoder_hits=1)


def test_counts_and_rates(run):
    measured = measures.counts_and_rates(run)
    assert (measured["requests"], measured["images"], measured["input_tokens"], measured["output_tokens"]) == (
        2,
        1,
        20,
        5,
    )
    assert measured["output_tokens_per_second"] == 5 / 9 and measured["images_per_second"] == 1 / 9


def test_latencies_are_measured_from_arrival_or_from_a_given_time(run):
    measured = measures.latencies(run)
    assert measured["first_token_seconds"]["p50"] == 1.0
    assert measured["request_seconds"]["p50"] == 2.5
    assert measured["seconds_per_output_token"] == {"p50": 1.0, "p90": 1.0, "p99": 1.0}
    assert measures.latencies(run, since=1000.0)["first_token_seconds"]["p50"] == pytest.approx((2 + 7) / 2)


def test_phases_add_up_to_the_run(run):
    assert measures.phases(run) == pytest.approx(
        {
            "waiting_for_preparation": 1.0 + 2.0,
            "vision": 0.8,
            "prefill": 0.6,
            "decode": 2.1,
            "sampling": 0.5,
            "scheduling": 5 * 0.1 + 3 * 0.05 + 2 * 0.1 + 3 * 0.05,
            "other": 9.0 - 8.0,
        }
    )


def test_hit_rates(run):
    assert measures.hit_rates(run) == {"prefix_cache_hit_rate": 0.0, "encoder_cache_hit_rate": 0.25}
    without = Run(0.0, 0.0, 1.0, run.outputs, None)
    assert measures.hit_rates(without)["encoder_cache_hit_rate"] is None


def test_medians_of_nested_dicts():
    results = [{"a": {"b": number}, "c": None if number == 2 else 1} for number in (3, 1, 2)]
    assert measures.medians(results) == {"a": {"b": 2}, "c": None}


def test_roofline(run, make_llm):
    llm = make_llm(None)
    config = llm.engine.model_config
    costs = ModelCosts(config)
    weight_bytes = 4 * costs.weights_read_by_a_step()
    machine = Machine(bytes_per_second=1e9, flops_per_second=1e9)
    shares = Roofline(machine, llm).shares(run)
    key_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    # Decoded tokens see 11 and 12 keys of the first request, 11 of the second: 34 / 3 on average, and there are four.
    read = 3 * weight_bytes + 4 * 34 / 3 * key_bytes
    assert shares["decode_of_bandwidth"] == pytest.approx(read / 2.1 / 1e9)
    prefill = costs.decoder_flops(20, 2 * 55) + costs.head_flops(2)
    assert shares["prefill_of_arithmetic"] == pytest.approx(prefill / 0.6 / 1e9)
    assert shares["vision_of_arithmetic"] == pytest.approx(costs.vision_flops((1, 4, 4)) / 0.8 / 1e9)


def test_the_limit_depends_on_concurrency(run, make_llm):
    llm = make_llm(None)
    config = llm.engine.model_config
    costs = ModelCosts(config)
    weight_bytes = 4 * costs.weights_read_by_a_step()
    prompts = costs.decoder_flops(20, 2 * 55) + costs.head_flops(2) + costs.vision_flops((1, 4, 4))
    key_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    slow_memory = Roofline(Machine(bytes_per_second=1e6, flops_per_second=1e9), llm)
    for concurrency, num_steps in ((1, 3), (2, 1.5), (50, 1.5)):  # there are two requests, with three decoded tokens
        seconds = prompts / 1e9 + (num_steps * weight_bytes + 34 * key_bytes) / 1e6
        assert slow_memory.limit(run, concurrency) == pytest.approx(2 / seconds)
    slow_arithmetic = Roofline(Machine(bytes_per_second=1e15, flops_per_second=1e9), llm)
    decode = costs.decoder_flops(3, 34) + costs.head_flops(3)
    assert slow_arithmetic.limit(run, 2) == pytest.approx(2 / ((prompts + decode) / 1e9))


@pytest.mark.parametrize(
    ("dtype", "quantization", "method"),
    [
        (torch.float32, None, None),
        pytest.param(torch.bfloat16, None, OneDNNLinear, marks=NEEDS_BFLOAT16),
        (torch.bfloat16, "fp8", Fp8Linear),
        (torch.bfloat16, "int4", Int8Linear),
    ],
)
def test_a_machine_is_measured(dtype, quantization, method, monkeypatch):
    """With the products of the kind of quantization, of which those with 8 bits are the fastest for 4 bits."""
    methods, process = [], Linear.process_weights_after_loading
    monkeypatch.setattr(
        Linear, "process_weights_after_loading", lambda layer: (methods.append(layer.linear_method_cls), process(layer))
    )
    monkeypatch.setitem(roofline.READ_BYTES, "cpu", 1 << 20)
    monkeypatch.setattr(roofline, "MATRIX_SIZES", {"cpu": 64})
    machine = Machine.measure(torch.device("cpu"), dtype, quantization)
    assert machine.bytes_per_second > 0 and machine.flops_per_second > 0
    assert methods == [method]


@pytest.mark.parametrize("quantization", kinds(["int8", "fp8"]))
def test_quantized_weights_take_a_byte_each_beside_their_scales(quantization, make_llm):
    llm = make_llm(None, quantization=quantization, dtype="bfloat16")
    config, costs = llm.engine.model_config, ModelCosts(llm.engine.model_config)
    weights = costs.weights_read_by_a_step()
    if quantization == "fp8":  # the head keeps its dtype
        weights += config.vocab_size * config.hidden_size
    assert 1 < Roofline(Machine(1e9, 1e9), llm).weight_bytes(1) / weights < 1.1


@torch.inference_mode()
def test_stored_bytes_are_those_of_codes_scales_and_all_else():
    """4 bits in a layer's own layout, 8 bits in a buffer, oneDNN's layout, and a head that is tied."""
    model = nn.Module()
    model.decoder, model.visual = nn.Module(), nn.Linear(50, 50)
    model.decoder.embed_tokens, model.lm_head = nn.Embedding(10, 64), Linear(64, 10, bias=False)
    model.lm_head.weight = model.decoder.embed_tokens.weight
    packed, quantized, moe = Linear(64, 32), Linear(64, 32, bias=False), nn.Module()
    packed.linear_method_cls, quantized.linear_method_cls = Int8Linear, W4A16Linear
    for layer in (packed, quantized):
        layer.process_weights_after_loading()
    moe.experts = Linear(64, 16, bias=False)
    moe.experts.weight = None
    moe.experts.register_buffer("stored", torch.zeros(16, 64, dtype=torch.int8))
    model.decoder.layers = nn.ModuleList([packed, quantized, moe])
    stored = StoredBytes.of(model)
    assert stored.head == 4 * 10 * 64 and stored.experts == 16 * 64
    assert stored.decoder == (32 * 64 + 12 * 32 + 4 * 32) + (32 * 32 + 5 * 32) + stored.experts


def test_shares_without_work_are_none(make_llm):
    empty = Run(0.0, 0.0, 1.0, [output(0, 1, 2, num_tokens=1, image=0)], None, [step(1.0, 10, 0, decoder=0.5)])
    shares = Roofline(Machine(1e9, 1e9), make_llm(None)).shares(empty)
    assert shares["decode_of_bandwidth"] is None and shares["vision_of_arithmetic"] is None
    assert shares["prefill_of_arithmetic"] > 0
