"""M-RoPE position ids: integers, computed once per request and kept with its sequence.

Text advances all three axes (time, height, width) together. An image starts at the position after the preceding text
and spreads over height and width by row and column (a video also over time by frame). The following text continues
after the image's longer side, so positions differ from token counts by a constant that decoding needs: the delta.
(Qwen2-VL, arXiv 2409.12191, section 2.1.)
"""

from collections.abc import Sequence

import numpy as np


def mrope_positions(
    num_tokens: int,
    vision_placeholders: Sequence[tuple[int, int]],
    grids: Sequence[tuple[int, int, int]],
    merge_size: int,
    time_steps: Sequence[float] | None = None,
) -> tuple[np.ndarray, int]:
    """Return positions (3, num_tokens) int64 of a prompt, and the delta to add to the index of a generated token.

    `vision_placeholders` are the (offset, length) of each run of placeholder tokens in the prompt, in order; `grids`
    their (t, h, w) in patches. `time_steps` are the positions from one temporal patch to the next (1 by default), whose
    multiples are rounded down. The positions equal the result of transformers' `get_rope_index`. A completion continues
    the text as in transformers' `generate`, even if a video has more temporal patches than rows and columns. Its tokens
    thus have the same positions as in a later prompt that begins with this one.
    """
    parts, end, position = [], 0, 0
    steps = [1.0] * len(grids) if time_steps is None else time_steps
    for (offset, length), (t, h, w), step in zip(vision_placeholders, grids, steps, strict=True):
        parts.append(np.tile(np.arange(position, position + offset - end), (3, 1)))
        position += offset - end
        rows, columns = h // merge_size, w // merge_size
        indices = np.indices((t, rows, columns)).reshape(3, -1)
        indices[0] = indices[0].astype(np.float32) * np.float32(step)  # in float32, as transformers does
        parts.append(indices + position)
        assert parts[-1].shape[1] == length, f"grid {(t, h, w)} gives {parts[-1].shape[1]} tokens, placeholder {length}"
        position += max(rows, columns)
        end = offset + length
    parts.append(np.tile(np.arange(position, position + num_tokens - end), (3, 1)))
    return np.concatenate(parts, axis=1).astype(np.int64), position - end
