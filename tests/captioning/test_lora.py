"""Captions with a LoRA adapter merged into the model: it is a setting of the captions."""

import pytest

from mmvllm.captioning import caption_images
from mmvllm.errors import ArgumentError
from tests.helpers.engine.requests import noise_image
from tests.helpers.models.adapters import make_adapter

ENGINE = {"device": "cpu", "num_kvcache_blocks": 64, "skip_warmup": True}


def test_an_adapter_is_a_setting(checkpoint, make_llm, tmp_path):
    image = tmp_path / "a.png"
    noise_image(60, 64).save(image)
    adapter = make_adapter(tmp_path / "adapter", checkpoint, target_modules="all-linear")
    output = tmp_path / "captions.jsonl"
    given = {"model": checkpoint, "engine_args": ENGINE, "dtype": "float32", "max_tokens": 6}
    captions = [next(iter(caption_images(image, **given, **own)))["caption"] for own in ({}, {"lora": adapter})]
    assert captions[0] != captions[1]

    (record,) = caption_images(image, output=output, lora=adapter, **given)
    assert record["caption"] == captions[1]
    assert list(caption_images(image, output=output, lora=adapter, **given)) == []
    with pytest.raises(ValueError, match=r"lora was '.*adapter', is None"):
        caption_images(image, output=output, **given)
    llm = make_llm(checkpoint, lora=adapter)
    assert list(caption_images(image, output=output, llm=llm, max_tokens=6)) == []
    with pytest.raises(ArgumentError, match="lora cannot be combined with llm"):
        caption_images(image, llm=llm, lora=adapter)
    with pytest.raises(ArgumentError, match="lora is one of the job's settings"):
        caption_images(image, model=checkpoint, engine_args=ENGINE | {"lora": adapter})
