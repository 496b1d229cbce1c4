"""Captioning for trainers: suffixes of caption files, existing texts as context, and folders with kohya's names."""

import json
import os
import tarfile
import threading
from pathlib import Path

import pytest

from mmvllm import LLM
from mmvllm.captioning import CaptionSettings, caption_images
from mmvllm.captioning.jobs.pending_tasks import Selection
from mmvllm.captioning.sources import context
from mmvllm.captioning.sources.context import MAX_BYTES, read_context
from mmvllm.captioning.sources.items import Item
from mmvllm.errors import ArgumentError
from tests.helpers.captioning.command import records
from tests.helpers.engine.requests import noise_image

ODD = ["10_sks dog", "5_[sks] d*g?", "1_a, (b) & c"]


@pytest.fixture(scope="module")
def llm(checkpoint):
    made = LLM(checkpoint, device="cpu", dtype="float32", num_kvcache_blocks=256, skip_warmup=True)
    yield made
    made.exit()


@pytest.fixture
def folder(tmp_path) -> Path:
    """Four images: b equals a, and a and b have texts beside them."""
    folder = tmp_path / "images"
    folder.mkdir()
    for i, name in enumerate("abcd"):
        noise_image(60 + i * (name > "b"), 64, seed=i * (name > "b")).save(folder / f"{name}.png")
    (folder / "a.txt").write_bytes("\ufeff sks, dög \r\n".encode())
    (folder / "b.txt").write_text("another")
    return folder


def run(paths, llm, **options) -> dict[str, dict]:
    with caption_images(paths, llm=llm, **{"max_tokens": 4, "prompt": "Describe."} | options) as made:
        return {Path(record["path"]).stem: record for record in made}


# Suffixes


@pytest.mark.parametrize("suffix", [".caption", ".txt", ".joy-caption.txt", ".légende"])
def test_caption_files_have_the_suffix(suffix, folder, llm, tmp_path):
    (tmp_path / "out").mkdir()
    made = run(folder, llm, format="txt", output_dir=tmp_path / "out", caption_extension=suffix)
    assert {record["file"] for record in made.values()} == {f"{tmp_path}/out/{name}{suffix}" for name in "abcd"}
    assert Path(made["a"]["file"]).read_text() == f"{made['a']['caption']}\n"


def test_caption_files_beside_images_and_a_second_run(folder, llm, tmp_path):
    options = {"format": "txt", "caption_extension": ".caption", "output": tmp_path / "out.jsonl"}
    assert run(folder, llm, **options)["a"]["file"] == str(folder / "a.caption")
    assert run(folder, llm, **options) == {}
    noise_image(90, 64, seed=9).save(folder / "e.png")
    (folder / "e.caption").write_text("by hand")
    assert "exists already" in run(folder, llm, **options)["e"]["error"]


@pytest.mark.parametrize("suffix", ["caption", "", ".", "..", ".a/b", ".a\\b", ".a b", "a.txt", ".a\0", ".{a}"])
def test_a_suffix_that_no_file_can_have_is_refused(suffix, folder, llm):
    for options in ({"format": "txt", "caption_extension": suffix}, {"context_from": suffix}):
        with pytest.raises(ArgumentError, match="give a dot and then letters"):
            run(folder, llm, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "txt", "caption_extension": ".PNG"}, "caption_extension is '.PNG': .*searched for images"),
        ({"format": "txt", "caption_extension": ".tar"}, "searched for images"),
        ({"context_from": ".webp"}, "context_from is '.webp': .*searched for images"),
        ({"context_from": ".json"}, "context is read from text files only"),
        ({"context_mode": "after"}, "context_mode must be one of prepend, append, got 'after'"),
        ({"caption_extension": ".caption"}, "caption_extension needs the format txt, got jsonl"),
        ({"format": "webdataset-json", "caption_extension": ".caption"}, "needs the format txt, got webdataset-json"),
        ({"format": "txt", "context_from": ".txt"}, "would replace the context that they are generated from"),
        ({"format": "txt", "caption_extension": ".tags", "context_from": ".tags"}, "choose another caption_extension"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options, message, folder, llm):
    with pytest.raises(ArgumentError, match=message):
        run(folder, llm, **options)


def test_the_command_has_the_options(caption, folder, tmp_path):
    out = tmp_path / "out.jsonl"
    options = ("--context-from", ".txt", "--context-mode", "append", "--prompt", "Describe.", "--output", out)
    assert caption(folder, "--format", "txt", "--caption-extension", ".caption", *options).code == 0
    prompts = {Path(record["path"]).stem: record["prompt"] for record in records(out)}
    assert prompts["a"] == "Describe.\n\nContext: sks, dög"
    assert len(list(folder.glob("*.caption"))) == 4
    done = caption(folder, "--caption-extension", "caption", "--format", "txt")
    assert done.code == 2 and "--caption-extension is 'caption': give a dot" in done.err


# Context


@pytest.mark.parametrize(("mode", "want"), [("prepend", "Context: sks, dög\n\nDescribe."), ("append", None)])
def test_the_text_beside_an_image_is_part_of_its_prompt(mode, want, folder, llm):
    made = run(folder, llm, context_from=".txt", context_mode=mode)
    assert made["a"]["prompt"] == (want or "Describe.\n\nContext: sks, dög")
    assert made["c"]["prompt"] == made["d"]["prompt"] == "Describe."
    assert made["a"]["prompt_tokens"] > run(folder, llm)["a"]["prompt_tokens"]


def test_equal_images_are_duplicates_only_with_equal_context(folder, llm):
    assert {record["duplicate_of"] for record in run(folder, llm, context_from=".txt").values()} == {None}
    (folder / "b.txt").write_bytes((folder / "a.txt").read_bytes())
    made = run(folder, llm, context_from=".txt", ordered=True)
    assert made["b"]["duplicate_of"] == str(folder / "a.png")


def test_a_changed_text_is_not_a_new_task(folder, llm, tmp_path):
    options = {"context_from": ".txt", "output": tmp_path / "out.jsonl"}
    assert len(run(folder, llm, **options)) == 4
    (folder / "a.txt").write_text("changed")
    assert run(folder, llm, **options) == {}


def test_outputs_without_context_resume_only_without_it(folder, llm, tmp_path):
    out = tmp_path / "out.jsonl"
    assert len(run(folder, llm, output=out)) == 4
    assert run(folder, llm, output=out, context_mode="prepend") == {}
    with pytest.raises(ArgumentError, match=r"context_from was None, is '\.txt'"):
        run(folder, llm, output=out, context_from=".txt")
    with pytest.raises(ArgumentError, match="context_mode was 'prepend', is 'append'"):
        run(folder, llm, output=out, context_mode="append")


def test_a_list_has_its_own_context(folder, llm, tmp_path):
    rows = [{"image": "a.png", "context": "own"}, {"image": "b.png", "context": ""}, {"image": "c.png"}]
    (folder / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = run(folder / "list.jsonl", llm, context_from=".txt", context_mode="append")
    assert [made[name]["prompt"] for name in "abc"] == ["Describe.\n\nContext: own", "Describe.", "Describe."]


def test_a_text_that_cannot_be_read_is_a_failure_that_can_be_retried(folder, llm, tmp_path):
    (folder / "a.txt").write_bytes(b"caf\xe9")
    (folder / "b.txt").unlink()
    os.mkfifo(folder / "b.txt")
    (folder / "c.txt").write_text("x" * (MAX_BYTES + 1))
    (folder / "d.txt").mkdir()
    options = {"context_from": ".txt", "output": tmp_path / "out.jsonl"}
    errors = {name: record["error"] for name, record in run(folder, llm, **options).items()}
    reason = "it is text neither in UTF-8 nor in UTF-16 with a byte order mark; save it as UTF-8"
    assert errors["a"] == f"{folder}/a.txt: the context cannot be read ({reason})"
    for name, reason in {"b": "a device or a pipe", "c": "more than 65536", "d": "it is a folder"}.items():
        assert "the context cannot be read (" in errors[name] and reason in errors[name]
    (folder / "a.txt").write_text("fixed")
    made = run(folder, llm, retry_failed=True, **options)
    assert made["a"]["error"] is None and made["a"]["prompt"].startswith("Context: fixed")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs a file whose size the system does not tell")
def test_a_text_that_the_system_makes_itself_is_limited_and_no_text(tmp_path):
    image = Item("a.png", "a.png", str(tmp_path / "a.png"))
    for target, reason in {"/proc/self/environ": "has a NUL character", "/proc/self/smaps": "more than 65536"}.items():
        (tmp_path / "a.txt").symlink_to(target)
        with pytest.raises(ValueError, match=f"the context .*{reason}"):
            read_context(image, ".txt", 20.0)
        (tmp_path / "a.txt").unlink()


def test_a_text_that_cannot_be_read_in_time_is_an_error(tmp_path, monkeypatch):
    """Such as on a share that does not answer."""
    is_over = threading.Event()
    monkeypatch.setattr(context, "_read", lambda path: is_over.wait(20))
    with pytest.raises(ValueError, match=r"a\.txt: the context cannot be read \(it takes longer than 0\.05 s\)"):
        read_context(Item("a.png", "a.png", str(tmp_path / "a.png")), ".txt", 0.05)
    is_over.set()


def test_images_in_tars_have_no_context(folder, llm, tmp_path):
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        tar.add(folder / "a.txt", "a.txt")
        tar.add(folder / "a.png", "a.png")
    (tmp_path / "shard.txt").write_text("of the tar")
    assert run(tmp_path / "shard.tar", llm, context_from=".txt")["a"]["prompt"] == "Describe."


def test_the_key_of_a_task_is_that_of_earlier_versions():
    assert CaptionSettings(context_from=None).fingerprint == CaptionSettings().fingerprint
    assert CaptionSettings(context_mode="append").fingerprint != CaptionSettings().fingerprint


# kohya's folders


@pytest.fixture
def kohya(tmp_path) -> Path:
    for i, name in enumerate(ODD):
        (tmp_path / "img" / name).mkdir(parents=True)
        noise_image(60 + i, 64, seed=i).save(tmp_path / "img" / name / "a.png")
        (tmp_path / "img" / name / "a.txt").write_text(f"tags {i}")
    return tmp_path / "img"


def test_folders_with_repeats_and_patterns_in_their_names_are_left_alone(kohya, llm, tmp_path):
    beside = {"format": "txt", "caption_extension": ".caption", "output": tmp_path / "out.jsonl"}
    with caption_images(kohya, llm=llm, max_tokens=4, **beside) as made:
        files = sorted(record["file"] for record in made)
    assert files == sorted(f"{kohya}/{name}/a.caption" for name in ODD)
    (tmp_path / "out").mkdir()
    with caption_images(kohya, llm=llm, max_tokens=4, format="txt", output_dir=tmp_path / "out") as made:
        assert len(list(made)) == 3
    assert sorted(path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*.txt")) == sorted(
        Path(name, "a.txt") for name in ODD
    )


@pytest.mark.parametrize("name", ODD)
def test_a_folder_that_is_named_is_not_a_pattern(name, kohya, llm):
    for path in (kohya / name, kohya / name / "a.png"):
        (item,) = Selection([path]).items()
        assert item.path == f"{kohya}/{name}/a.png"
    with caption_images(kohya / name, llm=llm, max_tokens=4, context_from=".txt") as made:
        assert next(made)["prompt"].startswith(f"Context: tags {ODD.index(name)}")


def test_shards_take_the_names_literally(kohya):
    parts = [[item.path for item in Selection([kohya], shard=(i, 2)).items()] for i in (1, 2)]
    assert sorted(parts[0] + parts[1]) == sorted(f"{kohya}/{name}/a.png" for name in ODD)
