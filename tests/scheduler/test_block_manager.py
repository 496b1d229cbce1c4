"""Blocks are shared by content: which requests get which blocks."""

import numpy as np
import pytest
import torch

from mmvllm import SamplingParams
from mmvllm.inputs import MultiModalItem, PlaceholderRange
from mmvllm.scheduler.block_manager import BlockManager
from mmvllm.scheduler.sequence import Sequence
from tests.helpers.engine.requests import ask, noise_image, ranges_of

ONE = SamplingParams(max_tokens=1, ignore_eos=True)


def sequence(token_ids, digests=(), placeholders=(), salt=None, block_size=4) -> Sequence:
    items = tuple(
        MultiModalItem("image", torch.empty(0), (1, 2, 2), digest, PlaceholderRange(*at))
        for digest, at in zip(digests, placeholders, strict=True)
    )
    return Sequence(
        list(token_ids), SamplingParams(), request_id="r", block_size=block_size, mm_items=items, cache_salt=salt
    )


def compute(manager: BlockManager, seq: Sequence) -> int:
    """Run a sequence's prompt through the manager; how many of its tokens were cached."""
    hit = seq.num_computed_tokens = manager.attach_prefix(seq)
    assert manager.allocate(seq, seq.num_tokens - hit) == []
    seq.num_computed_tokens = seq.num_tokens
    manager.commit(seq)
    manager.check([seq])
    return hit


def test_equal_prefixes_share_whole_blocks():
    manager = BlockManager(8, 4)
    first, second = sequence(range(10)), sequence([*range(8), 90, 91])
    compute(manager, first)
    second.num_computed_tokens = manager.attach_prefix(second)
    assert second.num_computed_tokens == 8 and second.block_table == first.block_table[:2]
    manager.check([first, second])
    manager.free(first)
    manager.free(second)
    manager.check([])


def test_what_is_forgotten_is_computed_again_and_held_blocks_stay():
    manager = BlockManager(8, 4)
    first, second, third = (sequence(range(10)) for _ in range(3))
    compute(manager, first)
    manager.forget()
    manager.check([first])
    first.token_ids += range(90, 96)  # it goes on, with a prefix that is no longer known
    manager.allocate(first, 6)
    first.num_computed_tokens = 16
    manager.commit(first)
    second.num_computed_tokens = manager.attach_prefix(second)
    assert second.num_computed_tokens == 0 and not second.block_table
    assert manager.allocate(second, 10) == []
    second.num_computed_tokens = 10
    manager.commit(second)
    manager.check([first, second])
    manager.free(first)
    assert manager.attach_prefix(third) == 8 and third.block_table == second.block_table[:2]
    manager.free(second)
    manager.free(third)
    manager.check([])


def test_the_last_token_is_never_taken_from_the_cache():
    manager = BlockManager(8, 4)
    first = sequence(range(8))
    compute(manager, first)
    assert manager.attach_prefix(sequence(range(8))) == 4


@pytest.mark.parametrize(
    "other",
    [
        {"digests": [b"B" * 16], "placeholders": [(2, 4)]},
        {"digests": [b"A" * 16], "placeholders": [(1, 4)]},  # the same rows, one token earlier
        {"digests": [b"A" * 16], "placeholders": [(2, 4)], "salt": "tenant"},
    ],
)
def test_images_and_salt_are_part_of_the_prefix(other):
    manager = BlockManager(8, 4)
    token_ids = [7] * 12  # all placeholders have the same token id
    compute(manager, sequence(token_ids, digests=[b"A" * 16], placeholders=[(2, 4)]))
    assert manager.attach_prefix(sequence(token_ids, **other)) == 0
    assert manager.attach_prefix(sequence(token_ids, digests=[b"A" * 16], placeholders=[(2, 4)])) == 8


def test_a_block_whose_prefix_differs_is_not_shared():
    manager = BlockManager(8, 4)
    compute(manager, sequence([1, 1, 1, 1, 5, 5, 5, 5, 9]))
    assert manager.attach_prefix(sequence([2, 2, 2, 2, 5, 5, 5, 5, 9])) == 0


def test_hits_are_correct_even_if_every_hash_collides(monkeypatch):
    class Collides(int):
        def __hash__(self):
            return 0

    manager = BlockManager(8, 4)
    compute(manager, sequence(map(Collides, [1, 2, 3, 4, 5])))
    assert manager.attach_prefix(sequence(map(Collides, [1, 2, 3, 9, 5]))) == 0
    assert manager.attach_prefix(sequence(map(Collides, [1, 2, 3, 4, 6]))) == 4


def test_uncached_blocks_are_used_first_then_the_least_recently_used_tail():
    manager = BlockManager(5, 4)
    first = sequence(range(9))  # two full blocks, and one with a single token
    compute(manager, first)
    head, tail, partial = first.block_table
    manager.free(first)
    other = sequence(range(50, 66))
    manager.allocate(other, 16)
    assert set(other.block_table[:3]) == {partial, 3, 4} and other.block_table[3] == tail
    assert manager.attach_prefix(sequence(range(9))) == 4
    assert head not in other.block_table


def test_allocate_is_all_or_nothing():
    manager = BlockManager(2, 4)
    seq = sequence(range(9))
    assert manager.allocate(seq, 9) is None
    assert seq.block_table == [] and manager.num_free_blocks == 2
    manager.check([seq])


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_fork_copies_on_write(length):
    manager = BlockManager(8, 4)
    parent = sequence(range(length))
    compute(manager, parent)
    child = sequence(range(length))
    child.num_computed_tokens = manager.fork(parent, child, length - 1)
    assert child.num_computed_tokens == length - 1
    assert child.block_table == parent.block_table
    copies = manager.allocate(child, 1)
    assert copies == [(parent.block_table[-1], child.block_table[-1])] and copies[0][0] != copies[0][1]
    assert child.block_table[:-1] == parent.block_table[:-1]
    manager.check([parent, child])
    assert manager.allocate(parent, 1) == [], "the parent's last block is no longer shared"


def test_check_finds_a_lost_block():
    manager = BlockManager(4, 4)
    seq = sequence(range(5))
    manager.allocate(seq, 5)
    with pytest.raises(AssertionError, match="reference counts"):
        manager.check([])


def blocks_of(llm, request) -> tuple[int, list]:
    output = llm.generate_multimodal([request], ONE)[0]
    return output.num_cached_tokens, output.token_ids


def test_requests_share_blocks_only_if_their_images_are_equal(checkpoint, make_llm, tmp_path):
    llm = make_llm(checkpoint, kvcache_block_size=4)
    image = noise_image(120, 90, 1)
    image.save(tmp_path / "same.png")
    asked = "Describe this image."
    before = ranges_of(llm.processor(ask(image, asked)))[0][0] // 4 * 4  # text before the image
    cold, tokens = blocks_of(llm, ask(image, asked))
    whole = (len(llm.processor(ask(image, asked)).token_ids) - 1) // 4 * 4
    assert cold == 0
    assert blocks_of(llm, ask(tmp_path / "same.png", asked)) == (whole, tokens)
    assert blocks_of(llm, ask(image, asked, cache_salt="other"))[0] == 0
    assert blocks_of(llm, ask(noise_image(120, 90, 2), asked))[0] == before
    assert blocks_of(llm, ask(image, asked, max_pixels=60 * 60))[0] == before
    # Other bounds are another treatment even if the size stays the same.
    assert blocks_of(llm, ask(image, asked, max_pixels=200 * 200))[0] == before


def test_another_grid_with_the_same_number_of_tokens_is_another_image(checkpoint, make_llm):
    llm = make_llm(checkpoint, kvcache_block_size=1)
    pixels = np.zeros((24, 3 * 2 * 14 * 14), dtype=np.float32)
    ids = [llm.engine.model_config.image_token_id] * 6 + [5]
    for grid in [(1, 4, 6), (1, 6, 4)]:
        llm.engine.add_request(ids, ONE, pixel_values=torch.from_numpy(pixels), image_grid_thw=[grid])
        while not llm.engine.is_finished():
            outputs, _ = llm.engine.step()
        assert outputs[0].num_cached_tokens == 0
