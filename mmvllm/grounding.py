"""Boxes and points that a model wrote, converted to pixels of the caller's image."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Pair = tuple[float, float]

# EXIF orientation -> function from a point (x, y) of the upright image of size (w, h) to the point of the stored image.
_TO_STORED: dict[int, Callable[[float, float, float, float], Pair]] = {
    1: lambda x, y, w, h: (x, y),
    2: lambda x, y, w, h: (w - x, y),
    3: lambda x, y, w, h: (w - x, h - y),
    4: lambda x, y, w, h: (x, h - y),
    5: lambda x, y, w, h: (y, x),
    6: lambda x, y, w, h: (y, w - x),
    7: lambda x, y, w, h: (h - y, w - x),
    8: lambda x, y, w, h: (h - y, x),
}


@dataclass(frozen=True, slots=True)
class BoxFormat:
    """How a model family writes boxes and points.

    Args:
        syntax: "tokens": <|box_start|>(x1,y1),(x2,y2)<|box_end|>, perhaps after a label between <|object_ref_start|>
            and <|object_ref_end|>; "json": objects with "bbox_2d" or "point_2d", and "label".
        scale: width and height of the image in the model's coordinates; None if the model's coordinates are pixels of
            the resized image.
    """

    syntax: Literal["tokens", "json"]
    scale: int | None = None


@dataclass(frozen=True, slots=True)
class ImageGeometry:
    """Sizes of a request's image in pixels: upright, as viewers show it, and resized for the model.

    `orientation` is the EXIF orientation of the image as it is stored, from 1 (upright) to 8.
    """

    width: int
    height: int
    resized_width: int
    resized_height: int
    orientation: int = 1

    def place(self, x: float, y: float, scale: int | None) -> Pair:
        """Convert the model's coordinates to a point of the upright image, clamped to the image."""
        across, down = (self.resized_width, self.resized_height) if scale is None else (scale, scale)
        return _within(x * self.width / across, self.width), _within(y * self.height / down, self.height)

    def stored(self, x: float, y: float) -> Pair:
        """Convert a point of the upright image to the point of the image as it is stored."""
        return _TO_STORED[self.orientation](x, y, self.width, self.height)

    @property
    def of_stored(self) -> "ImageGeometry":
        """The geometry of the image as it is stored."""
        if self.orientation < 5:
            return replace(self, orientation=1)
        return ImageGeometry(self.height, self.width, self.resized_height, self.resized_width)


def _within(value: float, size: int) -> float:
    return round(min(max(value, 0.0), float(size)), 2)


@dataclass(frozen=True, slots=True)
class Box:
    """A box in pixels of the upright image, from its upper left corner (0, 0): x1 <= x2 <= width, y1 <= y2 <= height.

    `image` is the index of the image in the request, and `geometry` has its sizes. If the model wrote a quadrilateral,
    `quad` has its four corners in the model's order, and the box encloses them.
    """

    label: str | None
    image: int
    x1: float
    y1: float
    x2: float
    y2: float
    quad: tuple[Pair, ...] | None = None
    geometry: ImageGeometry | None = field(default=None, repr=False, compare=False)

    def in_stored_pixels(self) -> "Box":
        """Return the box in the stored image, before EXIF rotation, which PIL and (on request) OpenCV decode."""
        g = self.geometry
        corners = self.quad or ((self.x1, self.y1), (self.x2, self.y2))
        turned = tuple(_rounded(g.stored(*corner)) for corner in corners)
        return box_of(self.label, self.image, turned, g.of_stored)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON: `label`, `image`, `box` with x1, y1, x2 and y2, and `quad` if there is one."""
        box = {"label": self.label, "image": self.image, "box": [self.x1, self.y1, self.x2, self.y2]}
        return box | ({} if self.quad is None else {"quad": [list(corner) for corner in self.quad]})


@dataclass(frozen=True, slots=True)
class Point:
    """A point in pixels of the upright image; `Box` explains the other fields."""

    label: str | None
    image: int
    x: float
    y: float
    geometry: ImageGeometry | None = field(default=None, repr=False, compare=False)

    def in_stored_pixels(self) -> "Point":
        """Return the point in the image as it is stored."""
        x, y = _rounded(self.geometry.stored(self.x, self.y))
        return replace(self, x=x, y=y, geometry=self.geometry.of_stored)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON: `label`, `image`, and `point` with x and y."""
        return {"label": self.label, "image": self.image, "point": [self.x, self.y]}


def box_of(label: str | None, image: int, corners: tuple[Pair, ...], geometry: ImageGeometry) -> Box:
    """Return the box around two opposite corners, or around the four corners of a quadrilateral."""
    xs, ys = zip(*corners, strict=True)
    quad = corners if len(corners) == 4 else None
    return Box(label, image, min(xs), min(ys), max(xs), max(ys), quad, geometry)


def _rounded(pair: Pair) -> Pair:
    return round(pair[0], 2), round(pair[1], 2)
