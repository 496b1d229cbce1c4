"""`mmvllm caption` in this process, and a folder of images."""

from pathlib import Path

import pytest

from mmvllm.cli.main import main
from tests.helpers.captioning.command import TINY
from tests.helpers.engine.requests import noise_image


@pytest.fixture
def caption(checkpoint, capsys):
    """Run `mmvllm caption` on a tiny model; returns exit code, lines of stdout, and stderr."""

    def run(*args: object) -> tuple[int, list[str], str]:
        code = main(["caption", "--model", str(checkpoint), *TINY, *map(str, args)])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return run


@pytest.fixture
def images(tmp_path) -> Path:
    """A folder with images at several depths, and other files."""
    folder = tmp_path / "images"
    for i, name in enumerate(("b.png", "a.JPG", "deep/er/c.webp", "deep/a.bmp", "with space.gif")):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        noise_image(60 + i, 64, seed=i).save(path, format="JPEG" if name.endswith("JPG") else None)
    (folder / "notes.txt").write_text("no image")
    (folder / "deep" / "folder.png").mkdir()
    return folder
