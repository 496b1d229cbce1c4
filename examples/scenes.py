"""Scenes of colored shapes and printed digits, with questions and answers: the data of the bundled model.

`python examples/scenes.py` writes the images of examples/images. Scenes are generated from a seed.
"""

import argparse
import random
from dataclasses import dataclass
from math import cos, pi, sin
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

COLOURS = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 90, 200),
    "yellow": (245, 215, 40),
    "purple": (140, 60, 170),
    "orange": (255, 127, 14),
    "black": (25, 25, 25),
}
SHAPES = ("circle", "square", "triangle", "star")
SIZES = {"small": 0.50, "large": 0.88}  # as a share of the shorter side of a cell
POSITIONS = ("top left", "top", "top right", "left", "center", "right", "bottom left", "bottom", "bottom right")
DIGITS = "0123456789"
NUMBERS = ("zero", "one", "two", "three")


@dataclass(frozen=True)
class Thing:
    """A shape, or a printed digit when `text` is set, in one of the nine cells of an image."""

    cell: int
    shape: str = ""
    colour: str = ""
    size: str = ""
    text: str = ""

    def __str__(self) -> str:
        return f'the text "{self.text}"' if self.text else f"a {self.size} {self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """An image's size in pixels, its background and its things in reading order."""

    width: int
    height: int
    background: tuple[int, int, int]
    things: tuple[Thing, ...]

    @property
    def shapes(self) -> list[Thing]:
        return [thing for thing in self.things if not thing.text]


def random_scene(rng: random.Random, text_share: float = 0.4) -> Scene:
    """Return one to three things in cells of an image of 180 to 480 pixels per side, with an aspect of up to 3:2.

    A share `text_share` of the scenes has a printed digit.
    """
    width = rng.randint(180, 480)
    height = min(480, max(180, round(width * rng.uniform(2 / 3, 3 / 2))))
    cells = sorted(rng.sample(range(9), rng.choice((1, 2, 2, 3, 3))))
    text_cell = rng.choice(cells) if rng.random() < text_share else None
    things = tuple(
        Thing(cell, text=rng.choice(DIGITS))
        if cell == text_cell
        else Thing(cell, rng.choice(SHAPES), rng.choice(list(COLOURS)), rng.choice(list(SIZES)))
        for cell in cells
    )
    return Scene(width, height, tuple(rng.randint(225, 255) for _ in range(3)), things)


def draw(scene: Scene, rng: random.Random) -> Image.Image:
    """Draw a scene, with small random offsets of positions and colors."""
    image = Image.new("RGB", (scene.width, scene.height), scene.background)
    pen = ImageDraw.Draw(image)
    border = max(2, min(scene.width, scene.height) // 60)
    pen.rectangle((0, 0, scene.width - 1, scene.height - 1), outline=(90, 90, 90), width=border)
    cell_w, cell_h = scene.width / 3, scene.height / 3
    for thing in scene.things:
        x = (thing.cell % 3 + 0.5 + rng.uniform(-0.06, 0.06)) * cell_w
        y = (thing.cell // 3 + 0.5 + rng.uniform(-0.06, 0.06)) * cell_h
        if thing.text:
            _draw_text(pen, thing.text, x, y, min(cell_w, cell_h))
        else:
            radius = SIZES[thing.size] * rng.uniform(0.93, 1.07) * min(cell_w, cell_h) / 2
            colour = tuple(max(0, min(255, part + rng.randint(-12, 12))) for part in COLOURS[thing.colour])
            _draw_shape(pen, thing.shape, x, y, radius, colour)
    return image


def _draw_shape(pen: ImageDraw.ImageDraw, shape: str, x: float, y: float, r: float, colour: tuple) -> None:
    if shape == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    elif shape == "square":
        pen.rectangle((x - 0.88 * r, y - 0.88 * r, x + 0.88 * r, y + 0.88 * r), fill=colour)
    else:
        # A star is a decagon with every second corner moved towards the center.
        lengths = (r, r, r) if shape == "triangle" else (r, 0.42 * r) * 5
        rays = [(length, 2 * pi * i / len(lengths)) for i, length in enumerate(lengths)]
        pen.polygon([(x + length * sin(a), y - length * cos(a)) for length, a in rays], fill=colour)


def _draw_text(pen: ImageDraw.ImageDraw, text: str, x: float, y: float, size: float) -> None:
    pen.text((x, y), text, font=ImageFont.load_default(size), fill=(10, 10, 10), anchor="mm")


def describe(scene: Scene) -> str:
    """Return the caption: all things and their positions, in reading order."""
    parts = [f"{thing} at the {POSITIONS[thing.cell]}" for thing in scene.things]
    text = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    return text[0].upper() + text[1:] + "."


DESCRIBE = (  # the bundled model was trained on these; other words change its accuracy
    "Describe this image.",
    "Describe the image.",
    "What is in this picture?",
    "Write a caption for this image.",
)
COLOR = ("color", "colour")
WHAT_AT = ("What is at the {}?", "What do you see at the {}?")
COUNT = ("How many shapes are there?", "Count the shapes.")
READ = ("What is written?", "Read the text.")


def questions(scene: Scene, rng: random.Random) -> list[tuple[str, str, str]]:
    """Return (kind, question, expected answer) for each kind that the scene allows."""
    asked = [("describe", rng.choice(DESCRIBE), describe(scene))]
    shapes = scene.shapes
    asked.append(("count", rng.choice(COUNT), _number(len(shapes))))
    shape = rng.choice([s.shape for s in shapes] if shapes and rng.random() < 0.75 else SHAPES)
    asked.append(("count", f"How many {shape}s are there?", _number(sum(s.shape == shape for s in shapes))))
    colour = rng.choice([s.colour for s in shapes] if shapes and rng.random() < 0.75 else list(COLOURS))
    asked.append(("count", f"How many {colour} shapes are there?", _number(sum(s.colour == colour for s in shapes))))

    by_cell = {thing.cell: thing for thing in scene.things}
    cell = rng.choice(list(by_cell)) if rng.random() < 0.75 else rng.randrange(9)
    answer = str(by_cell[cell]) if cell in by_cell else "nothing"
    asked.append(("what-at", rng.choice(WHAT_AT).format(POSITIONS[cell]), answer[0].upper() + answer[1:] + "."))

    if shapes:
        thing = rng.choice(shapes)
        asked.append(
            ("colour", f"What {rng.choice(COLOR)} is the shape at the {POSITIONS[thing.cell]}?", f"{thing.colour}.")
        )
        unique = [s for s in shapes if sum(t.shape == s.shape for t in shapes) == 1]
        if unique:
            thing = rng.choice(unique)
            asked.append(("colour", f"What {rng.choice(COLOR)} is the {thing.shape}?", f"{thing.colour}."))
    texts = [thing.text for thing in scene.things if thing.text]
    asked.append(("read", rng.choice(READ), f'"{texts[0]}".' if texts else "There is no text."))
    return [(kind, question, answer[0].upper() + answer[1:]) for kind, question, answer in asked]


def _number(count: int) -> str:
    return f"{NUMBERS[count]}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "images")
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1_000_000)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for i in range(args.count):
        rng = random.Random(args.seed + i)
        scene = random_scene(rng)
        draw(scene, rng).save(args.output / f"scene-{i + 1:02d}.png")
        print(f"scene-{i + 1:02d}.png  {describe(scene)}")


if __name__ == "__main__":
    main()
