"""`mmvllm caption` as a process on images that cannot be captioned."""

import json
import os
import shutil
import signal
import struct
import threading
import zlib
from pathlib import Path

from tests.helpers.captioning.command import all_but_the_last, by_name, many, recorded, records, until
from tests.helpers.engine.requests import noise_image


def bad_files(folder: Path) -> dict[str, str]:
    """Create files that cannot be captioned; returns the expected error by name."""
    whole = (folder / "000.png").read_bytes()
    header = struct.pack(">II5B", 50_000, 50_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    (folder / "empty.png").touch()
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "text.png").write_text("Dear Sir or Madam")
    (folder / "huge.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk + whole[33:])
    os.mkfifo(folder / "fifo.png")
    (folder / "nowhere.png").symlink_to("gone.png")
    (folder / "circle.png").symlink_to("circle.png")
    shutil.copy(folder / "000.png", folder / "secret.png")
    (folder / "secret.png").chmod(0)
    (folder / "locked").mkdir()
    (folder / "locked").chmod(0)
    (folder / "x.png").mkdir()
    return {
        "empty.png": "is empty (0 bytes)",
        "cut.png": "damaged or truncated",
        "text.png": "not an image in AVIF, BMP, ",
        "huge.png": "too large to decode",
        "fifo.png": "a device or a pipe",
        "nowhere.png": "no such file",
        "circle.png": "cannot be read",
        "secret.png": "Permission denied",
        "locked": "folder cannot be read (Permission denied)",
    }


def test_each_bad_file_is_a_record_and_other_images_are_not_affected(caption, folder, out, tmp_path):
    assert caption(folder, "--output", tmp_path / "good.jsonl").code == 0
    errors = bad_files(folder)
    done = caption(folder, "--output", out)
    made, good = by_name(out), by_name(tmp_path / "good.jsonl")
    assert done.code == 3 and "Traceback" not in done.err
    assert made.keys() == good.keys() | errors.keys()
    for name, message in errors.items():
        assert message in made[name]["error"] and str(folder) not in made[name]["error"], name
        assert made[name]["caption"] is None and made[name]["digest"] is None
    for name in good:
        assert {**made[name], "time": 0, "seconds": 0} == {**good[name], "time": 0, "seconds": 0}


def test_a_folder_or_a_missing_file_in_a_list_is_a_record(caption, folder, out, tmp_path):
    (tmp_path / "x.png").mkdir()
    (tmp_path / "list.txt").write_text(f"x.png\nabsent.png\n{folder}/000.png\n")
    assert caption(tmp_path / "list.txt", "--output", out).code == 3
    errors = {name: record["error"] for name, record in by_name(out).items()}
    assert errors == {"x.png": "is a folder, not an image", "absent.png": "no such file", "000.png": None}


def test_retry_failed_takes_only_failures_and_leaves_one_record_of_each(caption, folder, out):
    errors = bad_files(folder)
    caption(folder, "--output", out)
    before = by_name(out)
    noise_image(30, 30, seed=90).save(folder / "new.png")
    noise_image(30, 30, seed=91).save(folder / "text.png")
    (folder / "secret.png").chmod(0o600)
    done = caption(folder, "--output", out, "--retry-failed")
    after = by_name(out)
    assert done.code == 3 and after.keys() == before.keys()
    assert {name for name, record in after.items() if record["error"]} == errors.keys() - {"text.png", "secret.png"}
    assert after["secret.png"]["duplicate_of"] == str(folder / "000.png")
    assert all(after[name] == before[name] for name in before if before[name]["error"] is None)
    for name in ("empty.png", "cut.png", "huge.png", "fifo.png", "nowhere.png", "circle.png"):
        (folder / name).unlink()
        noise_image(30, 30, seed=92).save(folder / name)
    (folder / "locked").rmdir()
    assert caption(folder, "--output", out, "--retry-failed").code == 0
    assert by_name(out).keys() == before.keys() - {"locked"}  # a folder that can be read is not a failure any more


def test_a_killed_retry_is_cleaned_up_by_the_next_run(start, names, tmp_path, out):
    images = tmp_path / "images"
    images.mkdir()
    for i in range(150):
        (images / f"{i:03}.png").write_text("none yet")
    assert start(images, "--output", out).end().code == 3
    for i in range(150):
        noise_image(40, 40, seed=i).save(images / f"{i:03}.png")
    run = start(names, "--output", out, "--retry-failed")
    with all_but_the_last(images, names):
        until(lambda: recorded(out) >= 160)
        run.send(signal.SIGKILL)
        assert run.end().code == -signal.SIGKILL
    whole = out.read_bytes().rpartition(b"\n")[0]  # the last line may be incomplete
    kept = [json.loads(line) for line in whole.split(b"\n")[150:]]
    assert start(images, "--output", out, "--retry-failed").end().code == 0
    made = by_name(out)
    assert len(made) == 150 and all(record["error"] is None for record in made.values())
    assert all(made[os.path.basename(record["path"])] == record for record in kept)


def test_fail_fast_stops_at_the_first_failure(caption, images, out):
    assert caption("/absent.png", images, "--output", out, "--fail-fast", "--workers", "1").code == 3
    assert "absent.png" in by_name(out) and len(records(out)) < 300


def test_a_folder_may_change_while_it_is_read(start, tmp_path, out):
    images, ended = many(tmp_path / "many", 200), threading.Event()

    def change() -> None:
        for i in range(100_000):
            if ended.is_set():
                return
            path = images / f"{i % 200:03}-passing.png"
            if path.exists():
                path.unlink()
            else:
                shutil.copy(images / "000.png", path)

    thread = threading.Thread(target=change)
    thread.start()
    done = start(images, "--output", out).end()
    ended.set()
    thread.join()
    made = by_name(out)
    passing = {name: made.pop(name) for name in list(made) if "passing" in name}
    assert done.code in (0, 3) and "Traceback" not in done.err
    assert sorted(made) == [f"{i:03}.png" for i in range(200)]
    assert all(record["error"] is None for record in made.values())
    causes = ("no such file", "is empty", "damaged or truncated", "not an image")
    assert all(any(cause in record["error"] for cause in causes) for record in passing.values() if record["error"])
