"""Requests with LoRA adapters, in any mix, have the tokens of models that these adapters are merged into by PEFT."""

import shutil
from contextlib import nullcontext

import pytest
import torch

from mmvllm import LoRARequest, RequestError, SamplingParams
from mmvllm.lora.adapters import AdapterStore, model_without_weights
from mmvllm.models.lora import linear_regions
from mmvllm.models.registry import load_config
from tests.helpers.cpu import kinds
from tests.helpers.engine.engines import assert_idle
from tests.helpers.engine.rank_threads import use_rank_threads
from tests.helpers.engine.requests import ask, noise_image
from tests.helpers.models.adapters import DECODER, VISION, make_adapter, merged_checkpoint
from tests.helpers.models.shapes import RICHEST

TOKENS = 12
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
TOO_LARGE = r"the change of .*qkv_proj.* is too large for torch.float16 with its scale of (2\.5e\+07|2)$"
A, B = noise_image(91, 64, 1), noise_image(60, 133, 2)
REQUESTS = (ask(A, "Describe this image."), ask("Count the shapes."))
ADAPTERS = {
    "all": {"target_modules": "all-linear", "r": 4},
    "attention": {"target_modules": DECODER, "r": 2, "use_rslora": True},
    "vision": {"target_modules": VISION, "r": 3},
    "some": {"target_modules": ["q_proj", "down_proj", "qkv"], "rank_pattern": {"q_proj": 6}},
}


@pytest.fixture(scope="module")
def adapters(checkpoints, tmp_path_factory):
    """A function of a shape: an adapter for each of ADAPTERS."""
    made = {}

    def of(shape: str) -> dict[str, LoRARequest]:
        if shape not in made:
            folder = tmp_path_factory.mktemp(shape)
            made[shape] = {
                name: LoRARequest(name, 0, make_adapter(folder / name, checkpoints(shape), seed, **config))
                for seed, (name, config) in enumerate(ADAPTERS.items())
            }
        return made[shape]

    return of


@pytest.fixture(scope="module")
def expected(checkpoints, adapters, tmp_path_factory):
    """A function of a shape: tokens of REQUESTS with no adapter (None) and with each, merged by PEFT and run alone."""
    from mmvllm import LLM

    made = {}

    def of(shape: str) -> dict[str | None, list[list[int]]]:
        if shape not in made:
            made[shape], folder = {}, tmp_path_factory.mktemp("merged")
            for name, adapter in {None: None, **adapters(shape)}.items():
                model = checkpoints(shape)
                if adapter is not None:
                    model = merged_checkpoint(folder / name, model, adapter.lora_path)
                with LLM(model, dtype="float32", device="cpu", num_kvcache_blocks=64, skip_warmup=True) as llm:
                    outputs = [llm.generate_multimodal([request], GREEDY)[0] for request in REQUESTS]
                made[shape][name] = [output.token_ids for output in outputs]
        return made[shape]

    return of


def mixed(adapters: dict[str, LoRARequest]) -> list[dict]:
    """Each of REQUESTS without an adapter and with each."""
    return [{**request, "lora_request": own} for own in (None, *adapters.values()) for request in REQUESTS]


def tokens(llm, requests: list[dict]) -> list[list[int]]:
    outputs = llm.generate_multimodal(requests, GREEDY)
    assert_idle(llm)
    return [output.token_ids for output in outputs]


WAYS = {
    "plain": {"async_scheduling": False},
    "ahead": {"async_scheduling": True},
    "chunked": {"max_num_batched_tokens": 7},
    "few slots": {"max_loras": 1, "async_scheduling": True},
    "preempted": {"num_kvcache_blocks": 24, "kvcache_block_size": 4, "async_scheduling": True},
}


# One family in every way and every family in one by default.
CASES = [
    pytest.param(shape, way, marks=() if shape == RICHEST[0] or way == "ahead" else pytest.mark.slow)
    for shape in RICHEST
    for way in WAYS
]


@pytest.mark.essential(1)
@pytest.mark.slow
@pytest.mark.parametrize(("shape", "way"), CASES)
def test_mixed_batches(shape, way, checkpoints, adapters, expected, make_llm):
    want = [own for each in expected(shape).values() for own in each]
    assert len({*map(tuple, want)}) == len(want) - 1, "an adapter of the ViT alone changes nothing without an image"
    llm = make_llm(checkpoints(shape), enable_lora=True, **WAYS[way])
    assert tokens(llm, mixed(adapters(shape))) == want
    assert tokens(llm, mixed(adapters(shape))[::-1]) == want[::-1], "with warm caches"
    assert (way != "preempted") or llm.engine.scheduler.num_preemptions


@pytest.mark.network
def test_two_ranks(checkpoints, adapters, expected, make_llm, monkeypatch):
    use_rank_threads(monkeypatch)
    shape = "gqa2-tied"
    llm = make_llm(checkpoints(shape), enable_lora=True, max_loras=2, tensor_parallel_size=2)
    assert tokens(llm, mixed(adapters(shape))) == [own for each in expected(shape).values() for own in each]


@pytest.mark.slow
@pytest.mark.parametrize("quantization", kinds(["int8", "fp8"]))
def test_quantized_layers(quantization, checkpoints, adapters, make_llm):
    """Alone as in a batch, and other than without adapters."""
    options = {"dtype": "bfloat16", "quantization": quantization, "enable_prefix_caching": False}
    llm = make_llm(checkpoints("gqa2-tied"), enable_lora=True, **options)
    own = adapters("gqa2-tied")
    together = tokens(llm, mixed(own))
    assert len({*map(tuple, together)}) == len(together) - 1
    assert [tokens(llm, [request])[0] for request in mixed(own)] == together
    plain = make_llm(checkpoints("gqa2-tied"), **options)
    assert tokens(plain, list(REQUESTS)) == together[:2]


@pytest.mark.slow
def test_packed_weights(checkpoints, adapters, make_llm):
    """In bfloat16, whose activation is fused into the product unless adapters come between."""
    options = {"dtype": "bfloat16", "enable_prefix_caching": False}
    llm, own = make_llm(checkpoints("gqa2-tied"), enable_lora=True, **options), adapters("gqa2-tied")
    together = tokens(llm, mixed(own))
    assert [tokens(llm, [request])[0] for request in mixed(own)] == together
    merged = make_llm(checkpoints("gqa2-tied"), lora=own["all"].lora_path, **options)
    assert [ids[:2] for ids in tokens(merged, list(REQUESTS))] == [ids[:2] for ids in together[2:4]]


@pytest.mark.slow
def test_an_adapter_on_top_of_a_merged_one(checkpoints, adapters, expected, make_llm):
    own = adapters("gqa2-tied")
    llm = make_llm(checkpoints("gqa2-tied"), lora=own["all"].lora_path, enable_lora=True)
    got = tokens(llm, [{**request, "lora_request": own["attention"]} for request in (*REQUESTS,)])
    assert tokens(llm, list(REQUESTS)) == expected("gqa2-tied")["all"] != got


def test_n_completions(checkpoints, adapters, expected, make_llm):
    llm = make_llm(checkpoints("gqa2-tied"), enable_lora=True)
    request = {**REQUESTS[0], "lora_request": adapters("gqa2-tied")["some"]}
    output = llm.generate_multimodal([request], SamplingParams(max_tokens=TOKENS, ignore_eos=True, n=3))[0]
    assert [one.token_ids for one in output.completions] == [expected("gqa2-tied")["some"][0]] * 3


def test_caches_are_shared_by_equal_adapters_only(checkpoints, adapters, make_llm, tmp_path):
    llm, own = make_llm(checkpoints("gqa2-tied"), enable_lora=True, kvcache_block_size=4), adapters("gqa2-tied")
    copied = shutil.copytree(own["attention"].lora_path, tmp_path / "copy")
    hits = []
    for name, path in [(None, None), ("all", None), ("attention", None), ("attention", None), ("attention", copied)]:
        adapter = own[name] if name else None
        adapter = LoRARequest("other", 7, path) if path else adapter
        hits.append(llm.generate_multimodal([REQUESTS[0]], GREEDY, lora_request=adapter)[0].num_cached_tokens)
    assert hits[:3] == [0, 0, 0] and hits[3] > 0 and hits[4] == hits[3]
    cache = llm.engine.encoder_cache
    assert cache.num_lookups == 3 and cache.num_hits == 1, (
        "embeddings do not depend on an adapter that leaves the ViT alone"
    )


def test_a_changed_folder_is_another_adapter(checkpoints, adapters, expected, make_llm, tmp_path):
    llm, own = make_llm(checkpoints("gqa2-tied"), enable_lora=True, max_loras=1), adapters("gqa2-tied")
    folder = shutil.copytree(own["all"].lora_path, tmp_path / "adapter")
    for name in ("all", "attention"):
        shutil.copytree(own[name].lora_path, folder, dirs_exist_ok=True)
        got = llm.generate_multimodal(list(REQUESTS), GREEDY, lora_request=LoRARequest("one", 1, folder))
        assert [output.token_ids for output in got] == expected("gqa2-tied")[name]


def test_ways_to_name_an_adapter(checkpoints, adapters, expected, make_llm):
    llm, own = make_llm(checkpoints("gqa2-tied"), enable_lora=True), adapters("gqa2-tied")["all"]
    want = expected("gqa2-tied")["all"][1]
    messages = REQUESTS[1]["messages"]
    assert llm.chat(messages, GREEDY, lora_request=own)[0].token_ids == want
    ids = llm.processor(REQUESTS[1]).token_ids
    plain, adapted = llm.generate([ids, ids], GREEDY, lora_request=[None, own])
    assert adapted.token_ids == want != plain.token_ids
    assert llm.generate({"prompt_token_ids": ids, "lora_request": own}, GREEDY)[0].token_ids == want
    request_id = llm.add_request(ids, GREEDY, lora_request=own)
    while not (outputs := llm.step()[0]):
        pass
    assert outputs[0].request_id == request_id and outputs[0].token_ids == want


def test_a_step_that_fails_leaves_no_slot_unwritten(checkpoints, adapters, expected, make_llm):
    llm, own = make_llm(checkpoints("gqa2-tied"), enable_lora=True, max_loras=2), adapters("gqa2-tied")["all"]
    runner, real = llm.engine.model_runner, llm.engine.model_runner.run

    def fail(*_):
        runner.run = real
        raise RuntimeError("no")

    runner.run = fail
    request = {**REQUESTS[0], "lora_request": own}
    assert "no" in llm.generate_multimodal([request], GREEDY, on_error="return")[0].error
    assert tokens(llm, [request])[0] == expected("gqa2-tied")["all"][0]


def test_a_request_that_waits_for_a_slot_is_not_overtaken(checkpoints, adapters, make_llm):
    llm, own = make_llm(checkpoints("gqa2-tied"), enable_lora=True, max_loras=1), adapters("gqa2-tied")
    engine, prompt = llm.engine, llm.processor(REQUESTS[1])
    for name in ("all", "attention", None, "all"):
        engine.add(prompt, GREEDY, lora_request=own[name] if name else None)
    order = []
    while not engine.is_finished():
        order += [output.request_id for output in engine.step()[0]]
        engine.scheduler.check()
    assert order == ["auto-0", "auto-1", "auto-2", "auto-3"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lora_request": "folder"}, "lora_request must be a LoRARequest, got str"),
        ({"lora_request": LoRARequest("x", 1, "/nowhere")}, "adapter 'x': /nowhere is not a LoRA adapter: it has no"),
        ({"lora_request": "wide"}, "adapter 'wide': its rank is 17 for .*; max_lora_rank is 16"),
    ],
    ids=["type", "folder", "rank"],
)
def test_a_wrong_adapter_is_refused_with_its_request_alone(given, message, checkpoints, make_llm, expected, tmp_path):
    llm = make_llm(checkpoints("gqa2-tied"), enable_lora=True)
    if given["lora_request"] == "wide":
        folder = make_adapter(tmp_path / "wide", checkpoints("gqa2-tied"), target_modules=["q_proj"], r=17)
        given = {"lora_request": LoRARequest("wide", 1, folder)}
    requests = [REQUESTS[1], {**REQUESTS[1], **given}]
    with pytest.raises(RequestError, match=f"request 1: {message}") as caught:
        llm.generate_multimodal(requests, GREEDY)
    assert caught.value.param == "lora_request"
    good, bad = llm.generate_multimodal(requests, GREEDY, on_error="return")
    assert good.token_ids == expected("gqa2-tied")[None][1] and bad.exception.param == "lora_request"


@pytest.mark.parametrize("values", [{"lora_alpha": 1e8}, {"spread": 500}], ids=["with its scale", "as a product"])
def test_an_adapter_that_is_too_large_for_the_dtype_is_refused(values, checkpoints, tmp_path):
    folder = make_adapter(tmp_path / "large", checkpoints("gqa2-tied"), target_modules=["q_proj"], **values)
    model = model_without_weights(load_config(checkpoints("gqa2-tied")))
    for dtype in (torch.float32, torch.float16):
        store = AdapterStore(model, linear_regions(model), 16, dtype, torch.device("cpu"))
        with nullcontext() if dtype is torch.float32 else pytest.raises(RequestError, match=TOO_LARGE):
            assert store.load(LoRARequest("large", 1, folder)).matrices


def test_adapters_must_be_enabled_and_as_many_as_requests(checkpoints, adapters, make_llm):
    llm = make_llm(checkpoints("gqa2-tied"))
    own = adapters("gqa2-tied")["all"]
    with pytest.raises(RequestError, match="lora_request needs an engine with enable_lora=True"):
        llm.chat(REQUESTS[1]["messages"], lora_request=own)
    with pytest.raises(
        RequestError, match="lora_request must be a list with one value for each of 1 request, got 2 values"
    ):
        llm.chat(REQUESTS[1]["messages"], lora_request=[own, own])
    for wrong in ({"lora_name": ""}, {"lora_name": "a"}, {"lora_name": "a", "lora_path": 3}):
        with pytest.raises(RequestError, match=r"lora_(name|path) must be"):
            LoRARequest(**wrong)


def test_only_steps_with_adapters_run_without_graphs(checkpoints, adapters, make_llm):
    llm, asked = make_llm(checkpoints("gqa2-tied"), enable_lora=True, enable_prefix_caching=False), []

    class Graphs:
        def fits(self, inputs) -> bool:
            asked.append(inputs.adapters)
            return False

    llm.engine.model_runner.graphs = (Graphs(),)
    llm.generate_multimodal([{**REQUESTS[0], "lora_request": adapters("gqa2-tied")["all"]}], GREEDY)
    assert not asked
    llm.generate_multimodal([REQUESTS[0]], GREEDY)
    assert asked == [None] * TOKENS
