"""Boxes of requests from end to end: files with an EXIF orientation, every family, copies of outputs."""

import json
import pickle

import numpy as np
import pytest
from PIL import Image

from mmvllm import Box, Point, SamplingParams
from mmvllm.media.decoding import MediaDecoder
from mmvllm.media.policy import MediaPolicy
from mmvllm.processors.images.load import load_image
from mmvllm.processors.images.processor import SourceGeometry
from tests.helpers.engine.requests import ask, noise_image
from tests.helpers.engine.scripted import script
from tests.helpers.models.shapes import SHAPES

SHAPE_OF = {spec["family"]: name for name, spec in reversed(SHAPES.items()) if "vision" in spec}
WIDTH, HEIGHT = 45, 83  # upright
BOX = (4, 9, 22, 50)


def marked(orientation: int, path) -> None:
    """A file of this EXIF orientation, whose upright image is black with the box in white."""
    pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    x1, y1, x2, y2 = BOX
    pixels[y1:y2, x1:x2] = 255
    turns = {2: "fliplr", 3: "180", 4: "flipud", 5: "transpose", 6: "6", 7: "7", 8: "8"}
    stored = {
        None: pixels,
        "fliplr": pixels[:, ::-1],
        "180": pixels[::-1, ::-1],
        "flipud": pixels[::-1],
        "transpose": pixels.transpose(1, 0, 2),
        "6": np.rot90(pixels),  # turned to the left: it is to be turned to the right
        "7": pixels[::-1, ::-1].transpose(1, 0, 2),
        "8": np.rot90(pixels, -1),
    }[turns.get(orientation)]
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(np.ascontiguousarray(stored)).save(path, exif=exif)


def white(image: Image.Image) -> tuple[int, int, int, int]:
    ys, xs = np.nonzero(np.asarray(image.convert("L")) > 128)
    return xs.min(), ys.min(), xs.max() + 1, ys.max() + 1


def corners(box: Box) -> tuple[float, float, float, float]:
    return box.x1, box.y1, box.x2, box.y2


def written(llm, request: dict) -> str:
    """What a model that sees BOX writes."""
    box_format = llm.engine.media_rules.boxes
    (item,) = llm.processor(request).mm_items
    g = item.geometry
    across, down = (box_format.scale,) * 2 if box_format.scale else (g.resized_width, g.resized_height)
    x1, x2 = (round(x * across / g.width) for x in BOX[::2])
    y1, y2 = (round(y * down / g.height) for y in BOX[1::2])
    if box_format.syntax == "tokens":
        return f"<|object_ref_start|>it<|object_ref_end|><|box_start|>({x1},{y1}),({x2},{y2})<|box_end|>"
    return "```json\n" + json.dumps([{"bbox_2d": [x1, y1, x2, y2], "label": "it"}]) + "\n```"


@pytest.mark.slow
@pytest.mark.parametrize("family", SHAPE_OF)
def test_boxes_are_in_pixels_of_the_upright_and_of_the_stored_image(
    family, checkpoints, make_llm, tmp_path, monkeypatch
):
    llm = make_llm(checkpoints(SHAPE_OF[family]))
    for orientation in range(1, 9):
        path = tmp_path / f"{orientation}.png"
        marked(orientation, path)
        request = ask(path, "Where is it?")
        assert white(load_image(path)) == BOX
        with monkeypatch.context() as patch:
            script(patch, llm.tokenizer, written(llm, request))
            (output,) = llm.generate_multimodal([request], SamplingParams(max_tokens=200))
        (box,) = output.boxes
        assert (box.label, box.image) == ("it", 0)
        assert corners(box) == pytest.approx(BOX, abs=1), orientation
        with Image.open(path) as stored:
            assert corners(box.in_stored_pixels()) == pytest.approx(white(stored), abs=1), orientation
            assert (box.in_stored_pixels().geometry.width, box.in_stored_pixels().geometry.height) == stored.size


@pytest.mark.slow
def test_boxes_survive_copies(checkpoints, make_llm, monkeypatch):
    llm = make_llm(checkpoints(SHAPE_OF["qwen3_vl"]))
    text = '{"bbox_2d": [0, 0, 500, 500], "label": "<b>"} {"point_2d": [1000, 1000], "label": null}'
    script(monkeypatch, llm.tokenizer, text)
    request = ask(noise_image(90, 60), "?")
    (output,) = llm.generate_multimodal([request], SamplingParams(max_tokens=200, n=2))
    assert output.boxes == output["boxes"] == (Box("<b>", 0, 0, 0, 45, 30), Point(None, 0, 90, 60))
    assert pickle.loads(pickle.dumps(output)) == output
    assert pickle.loads(pickle.dumps(output.boxes[0])).in_stored_pixels() == output.boxes[0]
    made = json.loads(json.dumps(output.to_dict()))
    assert (
        made["boxes"]
        == made["completions"][1]["boxes"]
        == [
            {"label": "<b>", "image": 0, "box": [0, 0, 45, 30]},
            {"label": None, "image": 0, "point": [90, 60]},
        ]
    )
    (item,) = pickle.loads(pickle.dumps(llm.processor(request))).mm_items
    assert (item.geometry.width, item.geometry.height, item.geometry.orientation) == (90, 60, 1)
    stops = SamplingParams(max_tokens=200, stop=['"label": null'])
    assert llm.generate_multimodal([request], stops)[0].boxes == output.boxes[:1]
    (plain,) = llm.generate(["no image"], SamplingParams(max_tokens=200))
    assert plain.boxes == () and plain.text == output.text


def test_sizes_of_a_part_and_of_a_request_do_not_move_boxes(checkpoints, make_llm, monkeypatch):
    llm = make_llm(checkpoints(SHAPE_OF["qwen2_5_vl"]))
    for sizes in ({}, {"resized_height": 112, "resized_width": 56}, {"max_pixels": 28 * 28 * 8}):
        part = {"type": "image", "image": noise_image(301, 97), **sizes}
        request = ask(part, "?")
        (item,) = llm.processor(request).mm_items
        g = item.geometry
        assert (g.width, g.height) == (301, 97)
        corner = [0, 0, g.resized_width, g.resized_height]
        with monkeypatch.context() as patch:
            script(patch, llm.tokenizer, json.dumps({"bbox_2d": corner}))
            (output,) = llm.generate_multimodal([request], SamplingParams(max_tokens=200))
        assert corners(output.boxes[0]) == (0, 0, 301, 97)


@pytest.mark.spawns
def test_a_decoder_in_another_process_knows_the_orientation(tmp_path):
    marked(6, tmp_path / "6.png")
    decoder = MediaDecoder(MediaPolicy())
    try:
        with decoder.session() as load:
            image = load.image((tmp_path / "6.png").read_bytes())
    finally:
        decoder.close()
    assert SourceGeometry.of(image) == (WIDTH, HEIGHT, 6)
