"""Requests as users of vLLM and transformers write them, through `LLM`, `LLMEngine` and `AsyncLLM`."""

import asyncio
import base64
import collections
import io
import json
import types

import numpy as np
import pytest
import torch

import mmvllm
from mmvllm import LLM, AsyncLLM, EngineConfig, LLMEngine, SamplingParams
from mmvllm.entrypoints.request_queue import RequestPreparer
from mmvllm.errors import RequestError
from mmvllm.inputs import EngineInput
from mmvllm.processors.chat.requests import parse_request
from tests.helpers.engine.requests import ask, noise_image
from tests.helpers.media.images import encode

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
ENGINE = {"dtype": "float32", "device": "cpu", "num_kvcache_blocks": 128, "skip_warmup": True}
IMAGE = noise_image(90, 60)
TEXT = "<|vision_start|><|image_pad|><|vision_end|>What?"
PNG = encode(IMAGE)


def tokens(outputs) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def generated(llm, prompts, **options) -> list[list[int]]:
    return tokens(llm.generate(prompts, SHORT, use_tqdm=False, **options))


# Prompts of `generate`


@pytest.fixture(scope="module")
def with_image(shared_llm) -> list[int]:
    return tokens(shared_llm.generate_multimodal({"text": TEXT, "images": IMAGE}, SHORT))[0]


PROMPTS = {
    "dict": {"prompt": TEXT, "multi_modal_data": {"image": IMAGE}},
    "dict with ids": {"prompt": TEXT, "multi_modal_data": {"image": IMAGE}, "multi_modal_uuids": {"image": ["a"]}},
    "list of a dict": [{"prompt": TEXT, "multi_modal_data": {"image": [IMAGE]}}],
    "tuple of images": {"prompt": TEXT, "multi_modal_data": {"image": (IMAGE,)}},
    "array": {"prompt": TEXT, "multi_modal_data": {"image": np.asarray(IMAGE)}},
    "tensor": {"prompt": TEXT, "multi_modal_data": {"image": torch.tensor(np.asarray(IMAGE))}},
    "BytesIO": {"prompt": TEXT, "multi_modal_data": {"image": io.BytesIO(PNG)}},
    "bytes": {"prompt": TEXT, "multi_modal_data": {"image": PNG}},
    "ordered dict": collections.OrderedDict(prompt=TEXT, multi_modal_data={"image": IMAGE}),
    "salted": {"prompt": TEXT, "multi_modal_data": {"image": IMAGE}, "cache_salt": "mine"},
}


@pytest.mark.parametrize("form", PROMPTS)
def test_prompts_with_images_as_vllm_takes_them(form, llm, with_image):
    assert generated(llm, PROMPTS[form]) == [with_image]


@pytest.mark.parametrize("container", [list, tuple, np.array, torch.tensor])
def test_prompt_token_ids_with_images(container, llm, with_image):
    ids = container(llm.get_tokenizer()(TEXT)["input_ids"])
    assert generated(llm, {"prompt_token_ids": ids, "multi_modal_data": {"image": IMAGE}}) == [with_image]


@pytest.mark.parametrize("data", [None, {}, {"image": None}, {"image": []}])
def test_no_images_may_be_written_out(data, llm):
    assert generated(llm, {"prompt": "Count.", "multi_modal_data": data}) == generated(llm, "Count.")


def test_prompts_with_different_salts_share_no_blocks(llm):
    text = "Count the shapes. " * 20

    def num_cached_tokens(salt):
        return llm.generate({"prompt": text, "cache_salt": salt}, SHORT)[0].num_cached_tokens

    assert num_cached_tokens("mine") == 0
    assert num_cached_tokens("yours") == 0 and num_cached_tokens(None) == 0
    assert num_cached_tokens("mine") > 0


def test_strings_ids_and_dicts_may_be_mixed(llm, with_image):
    ids = llm.tokenizer("Count.")["input_ids"]
    mixed = [PROMPTS["dict"], "Count.", ids, np.array(ids), {"prompt": "Count."}, {"prompt_token_ids": tuple(ids)}]
    assert generated(llm, mixed) == [with_image] + generated(llm, "Count.") * 5


IDS = [5, 6, 7]


@pytest.mark.parametrize(
    "prompts, number",
    [
        (IDS, 1),
        (tuple(IDS), 1),
        (np.array(IDS), 1),
        (np.array(IDS, dtype=np.int32), 1),
        (torch.tensor(IDS), 1),
        ([np.int64(5), 6, np.int32(7)], 1),
        (list(torch.tensor(IDS)), 1),
        ([IDS, IDS], 2),
        (np.array([IDS, IDS]), 2),
        (torch.tensor([IDS, IDS]), 2),
        ([np.array(IDS), torch.tensor(IDS)], 2),
        ((ids for ids in (IDS, IDS)), 2),
    ],
)
def test_token_ids_in_any_container(prompts, number, llm):
    outputs = llm.generate(prompts, SHORT, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [IDS] * number
    json.dumps([output.to_dict() for output in outputs])


BAD_PROMPTS = {
    "read-only mapping": (types.MappingProxyType({"prompt": TEXT}), "got mappingproxy"),
    "UserDict": (collections.UserDict({"prompt": TEXT}), "got UserDict"),
    "UserDict in a list": ([collections.UserDict({"prompt": TEXT})], "got UserDict"),
    "bytes": (b"Count.", "got bytes"),
    "only images": ({"multi_modal_data": {"image": IMAGE}}, "needs exactly one of .*; this one has none"),
    "both": ({"prompt": "x", "prompt_token_ids": [5]}, "this one has 'prompt' and 'prompt_token_ids'"),
    "messages": (ask("x"), "unknown keys messages; known: prompt, prompt_token_ids, multi_modal_data"),
    "unknown key": ({"prompt": "x", "multi_modal_datas": {}}, "unknown keys multi_modal_datas"),
    "audio": (
        {"prompt": "x", "multi_modal_data": {"audio": []}},
        "multi_modal_data has audio; only 'image' and 'video'",
    ),
    "images without a modality": ({"prompt": "x", "multi_modal_data": [IMAGE]}, "must be a dict .*, got list"),
    "ids as prompt": ({"prompt": [5]}, "'prompt' must be a string, got list"),
    "one image, no placeholder": ({"prompt": "x", "multi_modal_data": {"image": IMAGE}}, "0 image placeholders but 1"),
    "a batch of images": ({"prompt": TEXT, "multi_modal_data": {"image": np.asarray(IMAGE)[None]}}, "image 0: .*shape"),
    "floats": ({"prompt": TEXT, "multi_modal_data": {"image": np.asarray(IMAGE) / 255}}, "image 0: .*float64"),
    "bools": (np.array([True, False]), "dtype bool"),
    "float ids": (np.array([5.0]), "dtype float64"),
    "empty": (np.array([]), "prompt is empty"),
    "None inside": ([None], "got NoneType"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_other_prompts_are_refused_by_name(name, llm):
    prompts, message = BAD_PROMPTS[name]
    with pytest.raises(RequestError, match=f"prompt 0: .*{message}"):
        llm.generate(prompts, SHORT)


def test_what_a_tokenizer_returns_is_refused_and_its_ids_are_taken(llm):
    """Iterating it would continue the words "input_ids" and "attention_mask"."""
    made = llm.tokenizer("Count.")
    with pytest.raises(RequestError, match="got BatchEncoding"):
        llm.generate(made, SHORT)
    assert generated(llm, made["input_ids"]) == generated(llm, "Count.")


# Image parts


def parts(path) -> dict[str, dict]:
    text = base64.b64encode(PNG).decode()
    return {
        "url": {"type": "image", "url": f"data:image/png;base64,{text}"},
        "path": {"type": "image", "path": str(path)},
        "Path": {"type": "image", "path": path},
        "base64": {"type": "image", "base64": text},
        "base64 with its data URI": {"type": "image", "base64": f"data:image/png;base64,{text}"},
        "image_url": {"type": "image_url", "image_url": {"url": str(path)}},
        "BytesIO": {"type": "image", "image": io.BytesIO(PNG)},
        "array": {"type": "image", "image": np.asarray(IMAGE)},
        "without a type": {"path": str(path)},
    }


@pytest.mark.parametrize("form", parts("x"))
def test_image_parts_as_other_libraries_write_them(form, llm, tmp_path):
    path = tmp_path / "image.png"
    path.write_bytes(PNG)
    messages = [{"role": "user", "content": [parts(path)[form], {"type": "text", "text": "What?"}]}]
    assert tokens(llm.chat(messages, SHORT, use_tqdm=False)) == tokens(
        llm.generate_multimodal(ask(IMAGE, "What?"), SHORT)
    )


def test_images_beside_messages_are_not_dropped(llm):
    for key, value in (("images", IMAGE), ("multi_modal_data", {"image": IMAGE})):
        (output,) = llm.generate_multimodal({**ask("What?"), key: value}, SHORT)
        assert output.num_image_tokens > 0


def test_grey_arrays_are_images(llm):
    grey = IMAGE.convert("L")
    first, second = llm.generate_multimodal([ask(np.asarray(grey), "What?"), ask(grey, "What?")], SHORT)
    assert first.token_ids == second.token_ids and np.asarray(grey).ndim == 2


@pytest.mark.parametrize("key", ["path", "base64"])
@pytest.mark.parametrize("value", [5, b"x", ["x"]])
def test_a_part_with_a_wrong_source_is_refused_by_both_front_doors(key, value, llm, checkpoint):
    bad = {"messages": [{"role": "user", "content": [{"type": "image", key: value}]}]}
    message = f"image 0: '{key}' of an image part must be a string"
    with pytest.raises(RequestError, match=f"request 0: {message}"):
        llm.generate_multimodal(bad, SHORT)

    async def online() -> None:
        async with AsyncLLM(checkpoint, **ENGINE) as engine:
            async for _ in engine.generate(bad, SHORT):
                pass

    with pytest.raises(RequestError, match=message):
        asyncio.run(online())


# Numbers of requests and of sampling parameters


def test_one_request_may_come_without_a_list(llm):
    one = llm.generate_multimodal(ask(IMAGE, "What?"), SHORT)
    assert len(one) == 1 and tokens(one) == tokens(llm.generate_multimodal([ask(IMAGE, "What?")], SHORT))
    assert tokens(llm.stream_multimodal(ask(IMAGE, "What?"), SHORT)) == tokens(one)


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate("x", [SHORT, SHORT]),
        lambda llm: llm.generate([], [SHORT]),
        lambda llm: llm.generate_multimodal(ask("x"), (SHORT, SHORT)),
        lambda llm: llm.chat(ask("x")["messages"], [SHORT, SHORT]),
        lambda llm: list(llm.stream_multimodal([ask("x")], [SHORT, SHORT])),
        lambda llm: list(llm.stream_multimodal([ask("x")], [SHORT, SHORT], stream=True)),
        lambda llm: llm.add_request("x", [SHORT, SHORT]),
        lambda llm: llm.add_request(ask("x"), [SHORT, SHORT]),
    ],
)
def test_more_sampling_params_than_requests_are_refused(call, llm):
    with pytest.raises(RequestError, match=r"\d sampling_params were given for \d requests?; give one each") as raised:
        call(llm)
    assert raised.value.param == "sampling_params" and raised.value.value > raised.value.limit


def test_a_request_has_no_list_of_parameters(llm):
    with pytest.raises(RequestError, match="request 0: sampling_params must be SamplingParams or a dict, got list"):
        llm.generate_multimodal({**ask("x"), "sampling_params": [SHORT, SHORT]})


def test_async_llm_refuses_a_list_of_parameters(checkpoint):
    async def online() -> None:
        async with AsyncLLM(checkpoint, **ENGINE) as engine:
            async for _ in engine.generate("x", [SHORT, SHORT]):
                pass

    with pytest.raises(RequestError, match="2 sampling_params were given for 1 request; give one each"):
        asyncio.run(online())


# Names that readers of vLLM and nano-vllm expect


def test_an_engine_takes_the_arguments_of_llm(checkpoint):
    engine = LLMEngine(checkpoint, **ENGINE, max_num_seqs=3, pipeline_parallel_size=1)
    assert engine.config == EngineConfig(**ENGINE, max_num_seqs=3).with_limits(torch.device("cpu"))
    engine.exit()
    with pytest.raises(TypeError, match="given a config and max_num_seqs; give one or the other"):
        LLMEngine(checkpoint, EngineConfig(), max_num_seqs=3)
    with pytest.raises(TypeError, match="LLMEngine has no argument 'max_num_seq'; did you mean 'max_num_seqs'"):
        LLMEngine(checkpoint, max_num_seq=3)
    assert {"EngineConfig", "LLMEngine"} <= set(mmvllm.__all__)


@pytest.mark.parametrize("kind, name", [(LLM, "LLM"), (AsyncLLM, "AsyncLLM")])
def test_both_front_doors_check_names_before_they_load(kind, name):
    with pytest.raises(TypeError, match=f"{name} has no argument 'max_modellen'; did you mean 'max_model_len'"):
        kind("/no/such/folder", max_modellen=5)
    with pytest.raises(ValueError, match="does not support pipeline_parallel_size=2"):
        kind("/no/such/folder", pipeline_parallel_size=2)


def test_arguments_of_vllm_that_change_nothing_are_accepted(checkpoint):
    accepted = {"pipeline_parallel_size": 1, "trust_remote_code": True, "revision": None, "swap_space": 4}
    accepted |= {"limit_mm_per_prompt": {"image": 2}}
    with LLM(checkpoint, **ENGINE, **accepted) as llm:
        params = SamplingParams(max_tokens=4, ignore_eos=True, skip_special_tokens=True, best_of=1)
        assert len(llm.generate("x", params)[0].token_ids) == 4
    with pytest.raises(TypeError, match="did you mean 'max_tokens'"):
        SamplingParams(max_token=4)


def test_an_llm_has_arguments_for_the_processors_of_all_requests(checkpoint):
    def num_tokens(llm: LLM, **keys) -> int:
        return llm.generate_multimodal([{**ask(IMAGE, "What?"), **keys}], SHORT)[0].num_image_tokens

    fewer, few = {"max_pixels": 56 * 56}, {"max_pixels": 28 * 28 * 9}
    with LLM(checkpoint, **ENGINE) as plain, LLM(checkpoint, **ENGINE, mm_processor_kwargs=fewer) as llm:
        want = num_tokens(plain, mm_processor_kwargs=fewer)
        assert num_tokens(llm) == num_tokens(llm, mm_processor_kwargs={"fps": 1}) == want < num_tokens(plain)
        assert num_tokens(llm, mm_processor_kwargs=few) == num_tokens(plain, mm_processor_kwargs=few) > want
        assert num_tokens(llm, **few) == num_tokens(plain, **few)
        as_size = {"size": {"longest_edge": few["max_pixels"], "shortest_edge": 4}}
        assert num_tokens(llm, mm_processor_kwargs=as_size) == num_tokens(plain, mm_processor_kwargs=few)
        assert num_tokens(llm, mm_processor_kwargs={"max_pixels": None}) == want
        with pytest.raises(ValueError, match="mm_processor_kwargs must be a dict, got 5"):
            num_tokens(llm, mm_processor_kwargs=5)


@pytest.mark.parametrize(
    ("own", "used"),
    [
        ({"num_frames": 4}, {"num_frames": 4, "min_pixels": 4, "max_pixels": 9}),
        ({"fps": [2.0, 2.0]}, {"fps": 2.0, "min_pixels": 4, "max_pixels": 9}),
        ({"min_pixels": 20}, {"fps": 1, "do_sample_frames": True, "min_pixels": 20}),
        ({"fps": None, "jpeg_draft": True}, {"fps": 1, "do_sample_frames": True, "min_pixels": 4, "max_pixels": 9}),
    ],
)
def test_arguments_of_a_request_replace_those_that_they_contradict(shared_llm, own, used):
    given = {"fps": 1, "do_sample_frames": True, "size": {"shortest_edge": 4, "longest_edge": 9}}
    seen = []

    def prepared(request: dict) -> EngineInput:
        seen.append(parse_request(request).video_kwargs)
        return EngineInput([5])

    prepare = RequestPreparer(shared_llm.engine, processor_kwargs=given).preparing(prepared)
    prepare({"text": "x", "videos": ["a.mp4"], "mm_processor_kwargs": own})
    assert seen == [[used]]


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
@pytest.mark.parametrize(
    ("given", "message"), [({"max_pixel": 4}, "has unknown keys max_pixel"), ([1], "must be a dict"), ("x", "must be")]
)
def test_wrong_arguments_for_processors_are_refused_before_anything_is_loaded(kind, given, message):
    with pytest.raises(ValueError, match=f"mm_processor_kwargs .*{message}"):
        kind("/no/such/folder", mm_processor_kwargs=given)


def test_an_llm_is_a_context_manager(checkpoint):
    with LLM(checkpoint, **ENGINE) as llm:
        assert generated(llm, "Count.")
    with pytest.raises(RuntimeError, match="the engine has exited"):
        llm.generate("Count.")
    with pytest.raises(ZeroDivisionError), LLM(checkpoint, **ENGINE) as other:
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="the engine has exited"):
        other.add_request("x")


def test_chat_takes_one_conversation_or_several(llm):
    one, other = ask(IMAGE, "What?")["messages"], ask("Count.")["messages"]
    want = tokens(llm.generate_multimodal([ask(IMAGE, "What?"), ask("Count.")], SHORT))
    assert tokens(llm.chat(one, SHORT)) == want[:1] and tokens(llm.chat([one, other], SHORT)) == want
    assert llm.chat([], SHORT) == []
    refused = llm.chat([{"role": "user"}], SHORT, on_error="return")
    assert "role" in refused[0].error


def test_steps_by_hand(llm):
    """A request in every form; one is aborted."""
    forms = [ask(IMAGE, "What?", request_id="mine"), "Count.", np.array(IDS), {"prompt": "Count.", "priority": -1}]
    ids = [llm.add_request(form, SHORT) for form in forms]
    lost = llm.add_request("lost", SHORT, request_id="lost", priority=-5)
    assert ids[0] == "mine" and len(set(ids)) == 4 and lost == "lost"
    outputs, num_tokens = llm.step()
    assert outputs == [] and num_tokens > 0
    aborted = llm.abort_request("lost")
    assert aborted.finish_reason == "aborted" and len(aborted.token_ids) == 1 and llm.abort_request("lost") is None
    finished = {}
    while not llm.engine.is_finished():
        finished |= {output.request_id: output for output in llm.step()[0]}
    assert set(finished) == set(ids) and finished[ids[1]].token_ids == finished[ids[3]].token_ids
    assert finished["mine"].num_image_tokens > 0


def test_an_output_reads_like_a_dict_and_like_vllms(llm):
    params = SamplingParams(n=2, max_tokens=3, ignore_eos=True, logprobs=2, temperature=1.0, seed=1)
    output = llm.generate_multimodal(ask(IMAGE, "What?"), params)[0]
    assert output.outputs is output.completions and output.outputs[0].text == output.text == output["text"]
    assert "text" in output and "outputs" in output and "nonsense" not in output and 5 not in output
    assert output.get("finish_reason") == "length" and output.get("nonsense") is None and output.get("x", 3) == 3
    with pytest.raises(KeyError):
        output["to_dict"]
    read = json.loads(json.dumps(output.to_dict()))
    assert read["text"] == output.text and read["token_ids"] == output.token_ids and read["error"] is None
    assert [each["token_ids"] for each in read["completions"]] == [each.token_ids for each in output.outputs]
    assert read["prompt_token_ids"] == output.prompt_token_ids and len(read["logprobs"]) == 3
    assert llm.get_tokenizer() is llm.tokenizer


def test_a_refused_request_is_ready_for_json_too(llm):
    output = llm.generate_multimodal(ask(b"nonsense", "x"), SHORT, on_error="return")[0]
    read = json.loads(json.dumps(output.to_dict()))
    assert read["error"] == output.error and read["finish_reason"] == "error" and read["completions"] == []
    assert output.exception.image_index == 0


@pytest.mark.parametrize("messages", [None, 5, {"role": "user", "content": "x"}])
def test_chat_refuses_what_is_no_list_of_messages(llm, messages):
    with pytest.raises(RequestError, match="messages must be a list of messages") as caught:
        llm.chat(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("prompts", [None, 5])
def test_generate_refuses_what_is_no_prompt(llm, prompts):
    with pytest.raises(RequestError, match=f"got {type(prompts).__name__}"):
        llm.generate(prompts)


def test_parameters_that_cannot_be_compared_fail_only_their_request(llm):
    bad = ask("x") | {"sampling_params": {"ignore_eos": np.array([1, 2])}}
    failed, good = llm.generate_multimodal([bad, ask("x")], SHORT, on_error="return", use_tqdm=False)
    assert failed.error == "ignore_eos must be True or False, got array([1, 2])" and good.error is None


def test_chat_names_itself_for_an_unknown_argument(llm):
    with pytest.raises(TypeError, match=r"chat\(\) got an unexpected keyword argument 'max_tokens'"):
        llm.chat(ask("x")["messages"], max_tokens=3)
