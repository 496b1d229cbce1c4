"""Tensors from callers: any container, owned at once, malformed ones refused with one clear message."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mmvllm import SamplingParams
from mmvllm.errors import RequestError
from mmvllm.inputs import EngineInput, MediaRules
from mmvllm.processors.tensors import input_from_tensors, own_grids, own_token_ids
from tests.helpers.engine.requests import ask, noise_image, patches_of

PAD, PATCH_DIM = 9, 6
RULES = MediaRules(PAD, None, 7, 8, "<start>", "<image>", "<video>", "<end>", merge_size=2, patch_dim=PATCH_DIM)
IDS = [1, PAD, 2, PAD, PAD, 3]
GRIDS = [(1, 2, 2), (1, 2, 4)]  # 4 patches and 8
PIXELS = np.random.default_rng(0).standard_normal((12, PATCH_DIM)).astype(np.float32)
SHORT = SamplingParams(max_tokens=5, ignore_eos=True)


def items(pixel_values=PIXELS, image_grid_thw=GRIDS, ids=IDS, **keys):
    return input_from_tensors(RULES, ids, pixel_values, image_grid_thw, **keys).mm_items


def reversed_view(array: np.ndarray) -> np.ndarray:
    return array[::-1].copy()[::-1]


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.setflags(write=False)
    return array


FORMS = {
    "packed array": PIXELS,
    "packed tensor": torch.tensor(PIXELS),
    "tensor with a gradient": torch.tensor(PIXELS, requires_grad=True),
    "list of arrays": [PIXELS[:4], PIXELS[4:]],
    "array and tensor": [PIXELS[:4], torch.tensor(PIXELS[4:])],
    "lists of numbers": [PIXELS[:4].tolist(), PIXELS[4:].tolist()],
    "columns of a larger tensor": torch.tensor(np.tile(PIXELS, 2))[:, :PATCH_DIM],
    "negative strides": [reversed_view(PIXELS[:4]), reversed_view(PIXELS[4:])],
    "packed, negative strides": reversed_view(PIXELS),
    "Fortran order": np.asfortranarray(PIXELS),
    "read-only arrays": [read_only(PIXELS[:4]), read_only(PIXELS[4:])],
    "big-endian": PIXELS.astype(">f4"),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_pixel_values_gives_the_same_patches_and_digest(form):
    want, got = items(), items(FORMS[form])
    assert [item.digest for item in got] == [item.digest for item in want]
    assert all(torch.equal(a.patches, b.patches) and a.patches.is_contiguous() for a, b in zip(got, want, strict=True))
    assert [item.placeholder for item in got] == [(1, 1), (3, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8])
def test_floats_of_any_size_and_uint8_are_taken_as_they_are(dtype):
    pixels = torch.ones(12, PATCH_DIM, dtype=dtype)
    assert {item.patches.dtype for item in items(pixels)} == {dtype}


def test_digests_differ_by_values_dtype_and_grid():
    def digest(pixels, grid=(1, 2, 4)):
        return items(pixels, [grid], [PAD, PAD])[0].digest

    zeros = torch.zeros(8, PATCH_DIM)
    same = [digest(zeros), digest(zeros.numpy()), digest([zeros]), digest(zeros, torch.tensor([1, 2, 4]))]
    assert len(set(same)) == 1
    others = [digest(zeros + 1), digest(zeros.byte()), digest(zeros.double()), digest(zeros, (1, 4, 2))]
    assert len({*same, *others}) == 5


BAD_GRIDS = {
    "1-D": ([1, 2, 2], r"must have shape \(number of images, 3\), got \(3,\)"),
    "(N, 2)": (np.ones((2, 2)), r"must have shape .*, got \(2, 2\)"),
    "3-D": (torch.ones(1, 1, 3), r"must have shape .*, got \(1, 1, 3\)"),
    "ragged": ([(1, 2, 2), (1, 2)], "rows of different lengths"),
    "fractions": ([(1, 2.5, 2)], "must have integers, got"),
    "nan": ([(1, float("nan"), 2)], "must have integers, got"),
    "infinite": ([(1, float("inf"), 2)], "must have integers, got"),
    "negative": ([(1, -2, 2)], r"must have positive sizes, .*, got \(1, -2, 2\)"),
    "odd": ([(1, 3, 2)], "multiples of 2"),
    "bool": (np.ones((1, 3), dtype=bool), "must have integers, got"),
    "a number": (5, "image_grid_thw must be an array or a list, got 5"),
    "None inside": ([None], "must have shape"),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", BAD_GRIDS)
def test_malformed_grids_are_refused(name):
    given, message = BAD_GRIDS[name]
    with pytest.raises(RequestError, match=message) as raised:
        items(image_grid_thw=given)
    assert raised.value.param == "image_grid_thw" and str(raised.value).startswith("image_grid_thw")


@pytest.mark.parametrize(
    "given", [GRIDS, np.array(GRIDS), torch.tensor(GRIDS, dtype=torch.float32), map(list, GRIDS), np.array(GRIDS, "u1")]
)
def test_grids_are_taken_from_any_container(given):
    assert own_grids(given, 2) == GRIDS
    assert all(type(size) is int for grid in own_grids(np.array(GRIDS), 2) for size in grid)


BAD_PIXELS = {
    "int32": (torch.zeros(12, PATCH_DIM, dtype=torch.int32), "have dtype torch.int32; give uint8 patches, or floats"),
    "complex": (torch.zeros(12, PATCH_DIM, dtype=torch.complex64), "have dtype torch.complex64"),
    "one image of two": ([torch.zeros(4, PATCH_DIM), torch.zeros(8, PATCH_DIM).int()], "have dtype torch.int32"),
    "objects": (np.zeros((12, PATCH_DIM), dtype=object), "cannot be read"),
    "a number": (1.5, "pixel_values must be an array or a list, got 1.5"),
    "None": (None, r"have shapes \[\]"),
    "no rows": (np.empty((0, PATCH_DIM)), r"have shapes \[\(0, 6\)\], .* needs \[\(4, 6\), \(8, 6\)\]"),
    "too few rows": (PIXELS[1:], r"have shapes \[\(11, 6\)\], .* needs"),
    "wrong width": (PIXELS[:, 1:], r"have shapes \[\(4, 5\), \(8, 5\)\]"),
    "one image": ([PIXELS[:4]], r"have shapes \[\(4, 6\)\]"),
}


@pytest.mark.parametrize("name", BAD_PIXELS)
def test_malformed_pixel_values_are_refused(name):
    given, message = BAD_PIXELS[name]
    with pytest.raises(RequestError, match=message) as raised:
        items(given)
    assert raised.value.param == "pixel_values"


def test_a_message_about_many_rows_stays_short():
    with pytest.raises(RequestError) as raised:
        items([[0.0] * PATCH_DIM] * 5000)
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize("given", [5, [1, 1], [(1, 1, 1)], [(0.5, 1)], [None]])
def test_malformed_placeholders_are_refused(given):
    with pytest.raises(RequestError, match=r"vision_placeholders .*must be \(offset, length\) pairs"):
        items(vision_placeholders=given)


def test_placeholders_and_digests_are_taken_from_arrays():
    made = items(vision_placeholders=np.array([[1, 1], [3, 2]]), image_digests=np.array([b"a", b"b"]))
    assert [item.placeholder for item in made] == [(1, 1), (3, 2)] and [item.digest for item in made] == [b"a", b"b"]
    assert all(type(number) is int for item in made for number in item.placeholder)


IDS_OF_ALL_KINDS = [
    [5, 6],
    (5, 6),
    np.array([5, 6], dtype=np.uint8),
    torch.tensor([5, 6]),
    [np.int64(5), 6],
    list(torch.tensor([5, 6])),
]


@pytest.mark.parametrize("given", IDS_OF_ALL_KINDS)
def test_token_ids_become_a_list_of_their_own(given):
    ids = own_token_ids(given)
    assert ids == [5, 6] and ids is not given and all(type(token_id) is int for token_id in ids)


@pytest.mark.parametrize("given", [torch.tensor([[5, 6]]), np.array([5.0]), np.array(5), range(3), None, b"abc"])
def test_other_token_ids_are_refused(given):
    with pytest.raises(RequestError, match="prompt"):
        own_token_ids(given)


@pytest.mark.parametrize("given", [[], np.array([]), torch.tensor([]), np.array([], dtype=int)])
def test_no_token_ids_are_an_empty_list(given):
    assert own_token_ids(given) == []


def overwrite(*buffers) -> None:
    for buffer in buffers:
        buffer[:] = [0] * len(buffer) if isinstance(buffer, list) else 0


@pytest.mark.thinned(3)
@pytest.mark.parametrize("as_numpy", [False, True])
@pytest.mark.parametrize("before", ["the first step", "the second chunk", "preemption"])
def test_a_caller_may_overwrite_its_buffers_after_add_request(before, as_numpy, checkpoint, make_llm):
    """Chunks of seven tokens, blocks of four: the image is computed over several steps, and again after preemption."""
    llm = make_llm(checkpoint, max_num_batched_tokens=7, kvcache_block_size=4)
    question = ask(noise_image(120, 90), "Describe this image.")
    want = llm.generate_multimodal(question, SHORT)[0].token_ids
    prompt: EngineInput = make_llm(checkpoint).processor(question)
    pixels, grids = torch.cat(patches_of(prompt)), torch.tensor([item.grid for item in prompt.mm_items])
    ids, spans = torch.tensor(prompt.token_ids), [list(item.placeholder) for item in prompt.mm_items]
    if as_numpy:
        pixels, grids, ids = pixels.numpy(), grids.numpy(), ids.numpy()
    other = make_llm(checkpoint, max_num_batched_tokens=7, kvcache_block_size=4)
    request_id = other.add_request(
        ids, SHORT, pixel_values=pixels, image_grid_thw=grids, vision_placeholders=spans, cache_salt="s"
    )
    if before != "the first step":
        other.step()
    overwrite(pixels, grids, ids, spans[0])
    if before == "preemption":
        other.engine.scheduler.preempt_all()
        assert other.engine.scheduler.groups[request_id].first_seq.num_preemptions == 1
    outputs = []
    while not other.engine.is_finished():
        outputs += other.step()[0]
    assert outputs[0].token_ids == want
    assert other.generate_multimodal(question, SHORT)[0].token_ids == want, "the cached embeddings belong to the image"


def test_patches_of_an_array_and_of_a_tensor_are_copies():
    given = [PIXELS[:4].copy(), torch.tensor(PIXELS[4:])]
    made = items(given)
    overwrite(*given)
    assert all(torch.equal(a.patches, b.patches) for a, b in zip(made, items(), strict=True))


def test_a_video_that_goes_on_behind_an_image_is_refused():
    rules = replace(RULES, video_token_id=10)
    ids, image, patches = [10, 10, 1, PAD, 2, 10], PIXELS[:4], PIXELS

    def given(*grids):
        return input_from_tensors(rules, ids, image, [(1, 2, 2)], pixel_values_videos=patches, video_grid_thw=grids)

    assert [item.placeholder for item in given((2, 2, 2), (1, 2, 2)).mm_items] == [(0, 1), (1, 1), (3, 1), (5, 1)]
    with pytest.raises(RequestError, match=r"are inside a video of grid \(2, 2, 2\); give grids in the order"):
        given((1, 2, 2), (2, 2, 2))
