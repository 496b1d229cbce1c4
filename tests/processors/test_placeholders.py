"""Image placeholders of a prompt are expanded to the number of tokens of each image."""

from dataclasses import replace

import pytest

from mmvllm.errors import RequestError
from mmvllm.models.folder import BUNDLED
from mmvllm.models.qwen2_vl import FAMILY
from mmvllm.models.registry import load_config
from mmvllm.processors.chat import expand_placeholders

RULES = FAMILY.media_rules(load_config(BUNDLED))
TOKENS = replace(RULES, image_token_id=9, start_token_id=8, end_token_id=7)


S, P, E = 8, 9, 7  # start, placeholder, end


@pytest.mark.parametrize(
    "token_ids, lengths, want, placeholders",
    [
        ([1, 2], [], [1, 2], []),
        ([], [], [], []),
        ([1, S, P, E, 2], [3], [1, S, P, P, P, E, 2], [(2, 3)]),
        ([S, P, E], [2], [S, P, P, E], [(1, 2)]),
        ([1, S, P, E, 2, S, P, E, 3], [2, 3], [1, S, P, P, E, 2, S, P, P, P, E, 3], [(2, 2), (7, 3)]),
        ([S, P, E, S, P, E], [2, 3], [S, P, P, E, S, P, P, P, E], [(1, 2), (5, 3)]),
        ([1, S, P, P, P, E, 2], [3], [1, S, P, P, P, E, 2], [(2, 3)]),  # already expanded
        ([S, P, P, E, 1, S, P, P, P, E], [2, 3], [S, P, P, E, 1, S, P, P, P, E], [(1, 2), (6, 3)]),
        ([S, P, P, E], [3], [S, P, P, P, E], [(1, 3)]),  # another number of placeholders than the image needs
        ([S, E], [2], [S, P, P, E], [(1, 2)]),
        ([S, 5, 6, E, 5], [1], [S, P, E, 5], [(1, 1)]),  # other tokens between start and end are replaced
        ([1, E, 2], [], [1, E, 2], []),
    ],
)
def test_placeholders_are_expanded_once(token_ids, lengths, want, placeholders):
    before = list(token_ids)
    assert expand_placeholders(token_ids, lengths, TOKENS) == (want, placeholders)
    assert expand_placeholders(want, lengths, TOKENS) == (want, placeholders)
    assert token_ids == before


@pytest.mark.parametrize(
    "token_ids, lengths, message",
    [
        (
            [1, 2],
            [4],
            r"prompt has 0 image placeholders but 1 image was given; write .* once per image",
        ),
        ([S, P, E, 1, S, P, E], [4], "prompt has 2 image placeholders but 1 image was given"),
        ([S, P, E], [], "prompt has 1 image placeholder but 0 images were given"),
        ([S, P, E], [2, 2], "prompt has 1 image placeholder but 2 images were given"),
        (
            [P],
            [4],
            r"0 image placeholders, 1 <.image_pad.> outside <.vision_start.> and <.vision_end.>, but 1",
        ),
        ([S, P, E, P, P], [1], r"prompt has 1 image placeholder, 2 <.image_pad.> outside .*, but 1 image was given"),
        (
            [1, S, P, 2],
            [1],
            r"0 image placeholders, 1 .* outside .*, 1 <.vision_start.> without <.vision_end.>, but",
        ),
        ([S, S, P, E], [1], r"prompt has 1 image placeholder, 1 <.vision_start.> without <.vision_end.>, but 1 image"),
        (
            [S],
            [],
            r"0 image placeholders, 1 <.vision_start.> without <.vision_end.>, but 0 images were",
        ),
    ],
)
def test_placeholders_that_do_not_fit_are_refused(token_ids, lengths, message):
    with pytest.raises(RequestError, match=message):
        expand_placeholders(token_ids, lengths, TOKENS)
