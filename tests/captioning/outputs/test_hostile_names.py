"""Links, pipes and names in folders, tars and outputs that come from others: nothing else is written to or read."""

import os
import tarfile
from io import BytesIO
from pathlib import Path

import pytest
import xxhash

from mmvllm import LLM
from mmvllm.captioning import caption_images
from mmvllm.captioning.outputs.atomic_write import replacing
from tests.helpers.engine.requests import noise_image


@pytest.fixture(scope="module")
def shared_llm(checkpoint):
    llm = LLM(checkpoint, device="cpu", num_kvcache_blocks=64, skip_warmup=True)
    yield llm
    llm.exit()


@pytest.fixture
def images(tmp_path, monkeypatch) -> Path:
    """The working directory, with the folder `images` in it."""
    monkeypatch.chdir(tmp_path)
    Path("images").mkdir()
    noise_image(60, 64).save("images/a.png")
    Path("victim.sh").write_text("precious")
    return Path("images")


def temporary_of(name: str) -> str:
    return f".{xxhash.xxh3_64_hexdigest(os.fsencode(name))}.tmp"


def caption(llm, *paths, **keys) -> list[dict]:
    return list(caption_images(paths, llm=llm, max_tokens=3, **keys))


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder", "file"])
def test_what_has_the_name_of_a_temporary_file_is_not_used(shared_llm, images, kind):
    path = images / temporary_of("a.txt")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "file":
        path.write_text("left by a run that was killed")
    else:
        path.symlink_to(Path("victim.sh" if kind == "link" else "new.sh").absolute())
    (record,) = caption(shared_llm, images, format="txt")
    assert (images / "a.txt").read_text() == record["caption"] + "\n" and not (images / "a.txt").is_symlink()
    assert Path("victim.sh").read_text() == "precious" and not Path("new.sh").exists()
    assert path.exists() == (kind == "folder")


def test_a_new_file_has_the_usual_permissions(tmp_path):
    target = tmp_path / "a.txt"
    with replacing(target) as file:
        assert os.fstat(file.fileno()).st_mode & 0o777 == 0o666 & ~_umask()
        file.write("new")
    assert target.read_text() == "new" and [*tmp_path.iterdir()] == [target]


def _umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


@pytest.mark.parametrize("target", ["victim.sh", "new.sh"])
def test_a_caption_file_that_is_a_link_is_not_followed(shared_llm, images, target):
    link = images / "a.txt"
    link.symlink_to(Path(target).absolute())
    (record,) = caption(shared_llm, images, format="txt")
    assert "exists already" in record["error"] and link.is_symlink()
    assert caption(shared_llm, images, format="txt", skip_existing=True) == []
    (record,) = caption(shared_llm, images, format="txt", overwrite=True)
    assert link.read_text() == record["caption"] + "\n" and not link.is_symlink()
    assert Path("victim.sh").read_text() == "precious" and not Path("new.sh").exists()


def packed(*names: str) -> Path:
    data = BytesIO()
    noise_image(60, 64).save(data, "PNG")
    with tarfile.open("images.tar", "w") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(data.getvalue())
            tar.addfile(member, BytesIO(data.getvalue()))
    return Path("images.tar")


LONG_FOLDER = "/".join(["d" * 200] * 20 + ["d" * 56])  # out/LONG_FOLDER/x.txt has 4086 characters, of at most 4095


@pytest.mark.parametrize(
    ("names", "failed", "reason"),
    [
        (["b.png", f"sub/{'p' * 300}.png", "c.png"], [1], "name too long"),
        ([f"{'d' * 300}/a.png", "c.png"], [0], "name too long"),
        (["b.png", "a/" * 100 + "x.png", "a/" * 99 + "x.png"], [1], "is in 101 folders, at most 100 are made"),
        (["b.png", "a/" * 1900 + "x.png", "c.png"], [1], "is in 1901 folders, at most 100 are made"),
        (["b.png", f"{LONG_FOLDER}/x.png", "c.png"], [1], "name too long"),
        (["x.png", "x.txt/y.png", "c.png"], [1], "is the caption file of another image"),
        (["x.txt/y.png", "x.png", "c.png"], [1], "is a folder"),
        (["x.txt/z/y.png", "x.txt.png", "x.png"], [2], "is a folder"),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_name_that_no_file_can_have_fails_alone(shared_llm, images, names, failed, reason, overwrite):
    keys = {"format": "txt", "output_dir": "out", "overwrite": overwrite, "ordered": True}
    made = caption(shared_llm, packed(*names), **keys)
    errors = [record["error"] for record in made]
    assert [i for i, error in enumerate(errors) if error is not None] == failed
    assert reason in errors[failed[0]].lower()
    for record in made:
        assert record["error"] or Path(record["file"]).read_text() == record["caption"] + "\n"
