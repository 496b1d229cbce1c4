"""How a video says that its frames are to be turned and mirrored."""

from typing import Any

import numpy as np

Matrix = tuple[int, int, int, int]  # (a, b, c, d): a pixel at (x, y) is shown at (a * x + c * y, b * x + d * y)


def upright(pixels: np.ndarray, matrix: Matrix | None) -> np.ndarray:
    """(height, width, 3) uint8, turned and mirrored as a display matrix says."""
    if matrix is None:
        return pixels
    a, b, c, d = matrix
    if abs(a) >= abs(b):
        return pixels[:: _step(d), :: _step(a)]
    return pixels.transpose(1, 0, 2)[:: _step(b), :: _step(c)]


def upright_size(height: int, width: int, matrix: Matrix | None) -> tuple[int, int]:
    """Height and width of a frame that `upright` has turned."""
    is_turned = matrix is not None and abs(matrix[1]) > abs(matrix[0])
    return (width, height) if is_turned else (height, width)


def _step(sign: int) -> int:
    return -1 if sign < 0 else 1


def display_matrix(frame: Any) -> Matrix | None:
    """Of a frame that is to be turned.

    PyAV's side data and their frame hold each other until Python collects cycles: only the first frame is asked.
    """
    from av.sidedata.sidedata import Type

    side_data = frame.side_data.get(Type.DISPLAYMATRIX)
    if side_data is None:
        return None
    a, b, _, c, d = np.frombuffer(bytes(side_data), dtype=np.int32)[:5].tolist()
    return a, b, c, d
