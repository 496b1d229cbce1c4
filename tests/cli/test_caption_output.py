"""What `mmvllm caption` says of failures, and of files and images that it does not caption."""

import re
import tarfile

import pytest

from mmvllm.captioning.jobs.progress import kind_of_failure
from mmvllm.captioning.sources.counts import MAX_NAMES, Counts


def rows(err: str) -> dict[str, str]:
    """The rows of the summary; lines that continue a row belong to it."""
    lines = err[err.index("captioned ") :].replace("\n" + 15 * " ", "; ").splitlines()
    return {line[:13].strip(): line[15:] for line in lines}


def damage(folder, number: int) -> None:
    for i in range(number):
        (folder / f"bad-{i:02}.png").write_text("none")
    (folder / "empty-1.png").touch()


def test_the_first_failures_are_printed_and_all_are_counted_by_reason(caption, images, tmp_path):
    damage(images, 12)
    code, out, err = caption(images, "--output", tmp_path / "out.jsonl", "--workers", "1")
    printed = [line for line in err.splitlines() if line.startswith(str(images))]
    assert (code, out, len(printed)) == (3, [], 10)
    assert printed[0].startswith(f"{images}/bad-00.png: not an image in AVIF, ")
    assert err.count("further failures are recorded, and not printed") == 1
    assert rows(err)["failed"] == "13; --retry-failed retries them, once they are fixed"
    assert re.fullmatch("12 not an image in AVIF, .*, WEBP; 1 is empty", rows(err)["reasons"])


def test_without_records_every_failure_is_printed_and_no_retry_is_offered(caption, images):
    damage(images, 12)
    for format in ((), ("--format", "jsonl")):
        code, out, err = caption(images, *format)
        shown = err if not format else "\n".join(out)
        assert code == 3 and all(f"bad-{i:02}.png" in shown for i in range(12))
        assert rows(err)["failed"] == "13" and "retry" not in err and "further" not in err


def test_a_name_with_control_characters_stays_in_one_line(caption, images, tmp_path):
    (images / "a\x1b[31m\nb.png").write_text("none")
    code, _, err = caption(images, "--output", tmp_path / "out.jsonl")
    assert code == 3 and f"{images}/a\\x1b[31m\\nb.png: not an image" in err


@pytest.mark.network
def test_the_login_of_a_url_is_not_printed(caption, images, tmp_path):
    urls = "http://user:hidden@127.0.0.1:1/a.png", "http://user:hidden@127.0.0.1:1/b.mp4"
    code, _, err = caption(*urls, "--output", tmp_path / "out.jsonl")
    assert code == 3 and "hidden" not in err
    for path in ("a.png", "b.mp4"):
        assert f"\nhttp://127.0.0.1:1/{path}: cannot be fetched ([Errno 111]" in f"\n{err}"
    assert rows(err)["reasons"] == "2 cannot be fetched"


def test_no_image_is_counted_twice(caption, images, tmp_path):
    damage(images, 2)
    arguments = (images, "--output", tmp_path / "out.jsonl")
    first, second = (rows(caption(*arguments)[2]) for _ in range(2))
    assert (first["captioned"], first["failed"][0]) == ("5", "3") and not {"skipped", "failed before"} & first.keys()
    assert second["skipped"] == "5 (recorded by an earlier run, or given twice)"
    assert second["failed before"] == "3 (recorded by an earlier run); --retry-failed retries them, once they are fixed"
    assert "failed" not in second and second["speed"] == "0.00 images/s"
    third = rows(caption(*arguments, "--retry-failed")[2])
    assert third["skipped"] == "5 (not recorded as failed)" and third["failed"] == "3"
    assert "failed before" not in third


def test_images_whose_caption_file_exists_are_named_as_such(caption, images):
    (images / "b.txt").write_text("there")
    err = caption(images, "--format", "txt", "--output", images / "out.jsonl", "--skip-existing")[2]
    assert rows(err)["skipped"] == "1 (recorded by an earlier run, or the caption file exists)"


def test_failures_do_not_count_as_speed(caption, images, tmp_path):
    for path in images.rglob("*.*"):
        if path.is_file():
            path.write_text("none")
    err = caption(images, "--output", tmp_path / "out.jsonl")[2]
    assert rows(err)["speed"] == "0.00 images/s" and "tokens/s" not in err


def test_files_that_are_ignored_are_counted_by_suffix(caption, images):
    for name in ("a.PDF", "deep/b.pdf", "c.wav", "README", ".DS_Store", "x.a-b", "y.unusually-long"):
        (images / name).write_text("")
    (images / ".hidden").mkdir()
    (images / ".hidden/d.png").write_text("")
    with tarfile.open(images / "shard.tar", "w") as tar:
        for name in ("a.pdf", "deep/.b.png", "c.json"):
            tar.add(images / "c.wav", name)
        tar.add(images / "b.png", "b.png")
        tar.add(images / ".hidden", "a-folder", recursive=False)
    want = "3 .pdf, 3 hidden, 2 with other suffixes, 1 without a suffix, 1 .wav, 1 .txt, 1 .json"
    _, _, err = caption(images)
    assert sorted(rows(err)["ignored"].split(", ")) == sorted(want.split(", "))
    assert "ignored" not in caption(images / "b.png")[2]
    _, _, err = caption(f"{images}/*.??v", images / "b.png")  # only what the pattern matches
    assert rows(err)["ignored"] == "1 .wav"


def test_kinds_of_failures_have_no_details_of_one_image():
    def kind(error: str, path: str = "/folder/my photo (1).png") -> str:
        return kind_of_failure({"path": path, "error": error})

    assert kind("is empty (0 bytes)") == "is empty"
    assert kind("has no pixels, it is 0x12") == "has no pixels, it is NxN"
    exists = "exists already; allow overwriting, or skip existing caption files"
    assert (
        kind(f"/out/my photo (1).txt {exists}")
        == kind(f"my photo (1).txt {exists}")
        == "the caption file exists already"
    )
    assert len(kind("x" * 1000)) == 100


def test_the_number_of_different_names_is_bounded():
    counts = Counts()
    for i in range(1000):
        counts.add(f"name {i}")
    counts.add("name 1")
    assert len(counts) == MAX_NAMES + 1 and counts.total() == 1001
    assert counts.shown(2) == [("name 1", 2), ("name 0", 1), ("others", 998)]
