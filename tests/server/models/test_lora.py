"""LoRA adapters as models of the server."""

import asyncio
import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmvllm import AsyncLLM, LoRARequest, RequestError, SamplingParams
from mmvllm.cli.main import main
from mmvllm.models.folder import BUNDLED
from tests.helpers.engine.data_parallel import DATA_PARALLEL
from tests.helpers.models.adapters import make_adapter
from tests.helpers.serving.server import CHAT, COMPLETIONS, ENGINE, RESPONSES, TOKENIZE, answered, call, chat, make_app
from tests.server.refusals import check_refusal, refusal

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: str(make_adapter(folder / name, BUNDLED, seed, target_modules="all-linear", spread=0.1))
        for seed, name in enumerate(("first", "second"))
    }


@pytest.fixture(scope="module")
def engine():
    engine = AsyncLLM(**ENGINE, enable_lora=True, max_loras=1)
    yield engine
    asyncio.run(engine.shutdown(drain=False))


GREEDY = {"temperature": 0, "ignore_eos": True}


def text_of(app, model: str) -> str:
    answer = answered(app, CHAT, chat("Describe the shapes.", max_tokens=12, **GREEDY) | {"model": model})
    assert answer["model"] == model
    return answer["choices"][0]["message"]["content"]


def completion_of(app, model: str) -> str:
    body = {"model": model, "prompt": ["A red", "A red"], "max_tokens": 8, **GREEDY}
    first, second = answered(app, COMPLETIONS, body)["choices"]
    assert first["text"] == second["text"]
    return first["text"]


def response_of(app, model: str) -> str:
    body = {"model": model, "input": "Describe the shapes.", "max_output_tokens": 12, **GREEDY}
    answer = answered(app, RESPONSES, body)
    assert answer["model"] == model
    return answer["output"][0]["content"][0]["text"]


def test_every_route_takes_adapters_as_models(engine, adapters, caplog):
    caplog.set_level(logging.INFO, "mmvllm.requests")  # and as it was, afterwards
    app, names = make_app(engine, lora_modules=adapters, log_requests="facts"), ["bundled", "first", "second"]
    listed = call(app, "GET", "/v1/models").json()["data"]
    parents = [None, "bundled", "bundled"]
    assert [(card["id"], card["parent"]) for card in listed] == [*zip(names, parents, strict=True)]
    assert call(app, "GET", "/v1/models/second").json()["parent"] == "bundled"
    for answer in (text_of, completion_of, response_of):
        assert len({answer(app, model) for model in names}) == 3
    logged = [record.getMessage() for record in caplog.records if record.name == "mmvllm.requests"]
    assert [line.count(f'"model": "{name}"') for line, name in zip(logged, names * 3, strict=True)] == [1] * 9
    counted = ((TOKENIZE, {"prompt": "A red"}), ("/detokenize", {"tokens": [1]}))
    for path, body in counted:
        answered(app, path, body | {"model": "first"})
    for path, body in (*counted, (CHAT, chat("Hello")), (RESPONSES, {"input": "x"})):
        words = "served: 'bundled' and 'first' and 'second'"
        check_refusal(app, path, body | {"model": "third"}, "model", words)


def test_adapters_are_loaded_and_unloaded(engine, adapters):
    app = make_app(engine, allow_lora_updating=True)
    answer = call(app, "POST", LOAD, json={"lora_name": "mine", "lora_path": adapters["first"]})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'mine' added successfully.")
    assert text_of(app, "mine") != text_of(app, "bundled")
    for name in ("mine", "bundled"):
        again = refusal(app, LOAD, {"lora_name": name, "lora_path": adapters["first"]})
        assert again["param"] == "lora_name"
    wrong = refusal(app, LOAD, {"lora_name": "other", "lora_path": "/nowhere"}, 404)
    assert wrong["param"] == "lora_path"
    wrong = refusal(app, LOAD, {"lora_name": "other", "lora_path": "/"})
    assert wrong["message"].startswith("adapter 'other': / is not a LoRA adapter")
    assert call(app, "GET", "/v1/models/mine").json()["root"] == adapters["first"]
    first = text_of(app, "mine")
    other = {"lora_path": adapters["second"], "load_inplace": True}
    assert call(app, "POST", LOAD, json={"lora_name": "mine"} | other).is_success
    assert text_of(app, "mine") != first
    refusal(app, LOAD, {"lora_name": "bundled"} | other)
    answer = call(app, "POST", UNLOAD, json={"lora_name": "mine"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'mine' removed successfully.")
    for name in ("mine", "bundled"):
        refusal(app, UNLOAD, {"lora_name": name}, 404)
    refusal(app, CHAT, chat("Hello") | {"model": "mine"}, 404)


@pytest.mark.parametrize("what", ["config", "weights"])
def test_an_adapter_that_cannot_be_used_is_the_clients_error(what, engine, adapters, tmp_path):
    app, folder = make_app(engine, allow_lora_updating=True), shutil.copytree(adapters["first"], tmp_path / "spoilt")
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    if what == "config":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"target_modules": "(" * 5000}))
    else:
        save_file({name: tensor * torch.nan for name, tensor in load_file(weights).items()}, weights)
    error = refusal(app, LOAD, {"lora_name": "spoilt", "lora_path": str(folder)})
    assert error["param"] == "lora_path" and len(error["message"]) < 1000
    assert call(app, "GET", "/health").json()["status"] == "ok"
    refusal(app, CHAT, chat("Hello") | {"model": "spoilt"}, 404)


def test_an_adapter_that_is_gone_is_refused_by_its_model(engine, adapters, tmp_path):
    folder = make_adapter(tmp_path / "gone", BUNDLED, target_modules=["q_proj"])
    app = make_app(engine, lora_modules={"gone": str(folder)})
    (folder / "adapter_config.json").unlink()
    assert refusal(app, CHAT, chat("Hello") | {"model": "gone"})["param"] == "model"


@pytest.mark.slow
def test_loading_must_be_allowed(engine, adapters):
    app = make_app(engine)
    for path in (LOAD, UNLOAD):
        assert call(app, "POST", path, json={"lora_name": "a", "lora_path": adapters["first"]}).status_code == 404


def test_a_server_does_not_start_with_an_adapter_that_cannot_be_used(engine, adapters, tmp_path):
    with pytest.raises(RequestError, match=r"adapter 'bad': .* is not a LoRA adapter"):
        make_app(engine, lora_modules={"bad": str(tmp_path)})
    with pytest.raises(RequestError, match="the name 'bundled' is taken"):
        make_app(engine, lora_modules={"bundled": adapters["first"]})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--allow-lora-updating"], "--allow-lora-updating needs --enable-lora"),
        (["--enable-lora", "--lora-modules", "a"], "--lora-modules: 'a' must be NAME=DIR"),
        (["--enable-lora", "--lora-modules", '{"name": "a"}'], "must be NAME=DIR"),
        (["--enable-lora", "--lora-modules", '{"name": "a", "path": 5}'], "must be NAME=DIR"),
        (["--enable-lora", "--lora-modules", "{a=b"], "must be NAME=DIR"),
        (
            ["--enable-lora", "--lora-modules", "a=b", '{"name": "a", "path": "c", "base_model_name": "x"}'],
            "--lora-modules has the name 'a' twice",
        ),
    ],
)
def test_wrong_options(words, message, capsys):
    assert main(["serve", *words]) != 0
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_several_engines(adapters):
    """Each reads the folder in its own process; the front process refuses wrong ones, and holds no values."""

    async def run() -> dict[str | None, list[int]]:
        async with AsyncLLM(**DATA_PARALLEL, enable_lora=True) as engine:
            with pytest.raises(RequestError, match="adapter 'bad': /nowhere is not a LoRA adapter"):
                engine.load_adapter(LoRARequest("bad", 1, "/nowhere"))
            found = {}
            for name in (None, *adapters):
                request = {"text": "A red", "lora_request": name and LoRARequest(name, 1, adapters[name])}
                params = SamplingParams(max_tokens=8, ignore_eos=True)
                found[name] = [delta async for delta in engine.generate(request, params)][-1].output.token_ids
            kept = engine._engine._adapters._kept.values()
            assert all(a.is_meta and b.is_meta for one in kept for a, b in one.matrices.values())
            return found

    found = asyncio.run(run())
    assert len({*map(tuple, found.values())}) == 3
