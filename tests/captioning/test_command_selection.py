"""`mmvllm caption` as a process: equal images, lists, shards, limits, and prompts."""

import json
import os
import shutil
import tarfile

import pytest

from tests.helpers.captioning.command import by_name, many, records
from tests.helpers.engine.requests import noise_image


def test_equal_images_are_captioned_once(caption, folder, out):
    shutil.copy(folder / "000.png", folder / "copy.png")
    noise_image(40, 40, seed=0).save(folder / "encoded.png", compress_level=0)
    noise_image(40, 40, seed=0).save(folder / "other.bmp")
    done = caption(folder, "--output", out)
    made = by_name(out)
    assert done.code == 0 and "3 (caption copied from an equal image)" in done.err
    equal = [made.pop(name) for name in ("000.png", "copy.png", "encoded.png", "other.bmp")]
    (first,) = [record for record in equal if record["duplicate_of"] is None]  # the one that was prepared first
    for record in equal:
        assert record["duplicate_of"] in (None, first["path"])
        assert (record["caption"], record["digest"]) == (first["caption"], first["digest"])
    assert [record["duplicate_of"] for record in made.values()] == [None] * 3


def test_equal_images_are_found_when_a_run_resumes(caption, folder, out):
    caption(folder, "--output", out)
    shutil.copy(folder / "002.png", folder / "later.png")
    done = caption(folder, "--output", out)
    made = by_name(out)
    assert made["later.png"]["duplicate_of"] == str(folder / "002.png")
    assert made["later.png"]["caption"] == made["002.png"]["caption"]
    assert "captioned      0\n" in done.err


def test_another_prompt_is_another_task(caption, folder, out, tmp_path):
    lines = [{"image": "000.png"}, {"image": "000.png", "prompt": "Count!"}, {"image": "000.png", "context": "A cat."}]
    (folder / "list.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert caption(folder / "list.jsonl", "--output", out).code == 0
    made = records(out)
    assert len(made) == 3 and all(record["duplicate_of"] is None for record in made)
    assert len({record["prompt"] for record in made}) == 3


@pytest.mark.parametrize(("seed", "num_duplicates"), [([], 0), (["--seed", "5"], 2)])
def test_sampled_captions_are_shared_only_with_a_seed(seed, num_duplicates, caption, folder, out):
    for name in ("copy.png", "copy2.png"):
        shutil.copy(folder / "000.png", folder / name)
    assert caption(folder, "--output", out, "--temperature", "1", *seed).code == 0
    assert sum(record["duplicate_of"] is not None for record in records(out)) == num_duplicates
    shutil.copy(folder / "001.png", folder / "later.png")
    assert caption(folder, "--output", out, "--temperature", "1", *seed).code == 0
    assert (by_name(out)["later.png"]["duplicate_of"] is not None) == bool(seed)


def test_shards_together_have_every_image_once(caption, tmp_path):
    images = many(tmp_path / "many", 60)  # enough that no shard is empty for any path of the folder
    outs = [tmp_path / f"{i}.jsonl" for i in (1, 2, 3)]
    for i, out in enumerate(outs, 1):
        assert caption(images, "--output", out, "--shard", f"{i}/3").code == 0
    found = [name for out in outs for name in by_name(out)]
    assert sorted(found) == [f"{i:03}.png" for i in range(60)]


def test_a_run_with_a_limit_can_be_resumed(caption, folder, out):
    (folder / "001.png").write_text("a failure is progress too")
    counts = []
    for _ in range(3):
        caption(folder, "--output", out, "--limit", "2")
        counts.append(len(by_name(out)))
    assert counts == [2, 4, 4]


@pytest.mark.parametrize("kind", ["txt", "stdin", "fifo.txt", "jsonl"])
def test_lists_name_images(kind, start, folder, out, tmp_path):
    names = [str(folder / f"{i:03}.png") for i in range(4)]
    text = "".join(f"{name}\n" for name in names)
    if kind == "jsonl":
        text = "".join(json.dumps({"image": name, "id": i}) + "\n" for i, name in enumerate(names))
    path = tmp_path / ("list.txt" if kind == "stdin" else f"list.{kind}")
    if kind == "fifo.txt":
        os.mkfifo(path)
        run = start(path, "--output", out)
        path.write_text(text)
    else:
        path.write_text(text)
        run = start(*(("-",) if kind == "stdin" else (path,)), "--output", out, stdin=path)
    assert run.end().code == 0
    made = sorted(records(out), key=lambda record: record["path"])
    assert [record["path"] for record in made] == names
    assert [record["id"] for record in made] == (["0", "1", "2", "3"] if kind == "jsonl" else [None] * 4)


def test_images_of_a_tar_are_named_by_shard_and_member(caption, folder, out, tmp_path):
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        for i in range(4):
            tar.add(folder / f"{i:03}.png", f"a/{i}.png")
    assert caption(folder, "--output", tmp_path / "files.jsonl").code == 0
    assert caption(tmp_path / "shard.tar", "--output", out).code == 0
    made, files = by_name(out), by_name(tmp_path / "files.jsonl")
    assert {record["path"] for record in made.values()} == {f"{tmp_path}/shard.tar/a/{i}.png" for i in range(4)}
    assert all(made[f"{i}.png"]["caption"] == files[f"{i:03}.png"]["caption"] for i in range(4))


def test_the_prompt_comes_from_an_option_a_file_or_a_preset(caption, folder, out, tmp_path):
    (tmp_path / "prompt.txt").write_text("What is here? é\n", encoding="utf-8")
    arguments = {"Count!": ["--prompt", "Count!"], "What is here? é": ["--prompt-file", tmp_path / "prompt.txt"]}
    for preset in ("short", "detailed", "alt-text", "tags", "ocr"):
        text = caption("--list-presets").out.partition(f"{preset}: ")[2].partition("\n")[0]
        arguments[text] = ["--preset", preset]
    for options in arguments.values():
        assert caption(folder / "000.png", "--output", out, "--append-anyway", *options).code == 0
    assert [record["prompt"] for record in records(out)] == list(arguments)
    for wrong in (["--preset", "long"], ["--prompt", "a", "--preset", "tags"], ["--prompt-file", tmp_path / "absent"]):
        assert caption(folder / "000.png", "--output", out, *wrong).code == 2


def test_a_system_message_and_pixel_bounds_change_the_prompt(caption, folder, out):
    tokens = []
    noise_image(112, 112).save(folder / "large.png")
    for options in ([], ["--system", "You are brief."], ["--min-pixels", "18000"], ["--max-pixels", "4000"]):
        path = out.with_name(f"{len(tokens)}.jsonl")
        assert caption(folder / "large.png", "--output", path, *options).code == 0
        (record,) = records(path)
        tokens.append((record["prompt_tokens"], record["image_tokens"]))
    plain, system, larger, smaller = tokens
    assert system[0] > plain[0] and system[1] == plain[1]
    assert larger[1] > plain[1] > smaller[1]
    assert larger[0] - larger[1] == plain[0] - plain[1] == smaller[0] - smaller[1]


def test_prefix_suffix_and_trigger_word(caption, folder, out):
    caption(folder / "000.png", "--output", out.with_name("plain.jsonl"))
    options = ["--prefix", "A photo: ", "--suffix", " (end)", "--trigger-word", "sks"]
    assert caption(folder / "000.png", "--output", out, *options).code == 0
    (plain,), (around,) = records(out.with_name("plain.jsonl")), records(out)
    assert around["caption"] == f"A photo: sks, {plain['caption']} (end)"


def test_a_list_gives_each_image_its_own_prompt_context_and_id(caption, folder, out):
    lines = [
        {"image": "000.png"},
        {"image": "001.png", "prompt": "Count!", "id": 7},
        {"image": "002.png", "context": "A cat.", "id": "c"},
        {"image": "003.png", "prompt": "Count!", "context": "A cat."},
        {"image": 5},
    ]
    (folder / "list.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n{")
    assert caption(folder / "list.jsonl", "--output", out, "--prompt", "Say.").code == 3
    made = by_name(out)
    asked = {name: (record["id"], record["prompt"]) for name, record in made.items() if record["error"] is None}
    assert asked == {
        "000.png": (None, "Say."),
        "001.png": ("7", "Count!"),
        "002.png": ("c", "Context: A cat.\n\nSay."),
        "003.png": (None, "Context: A cat.\n\nCount!"),
    }
    assert made["list.jsonl:5"]["error"] and made["list.jsonl:6"]["error"]
