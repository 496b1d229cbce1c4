"""The captioning benchmark: the files that it makes, and equal captions from all methods; times are not tested."""

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from mmvllm.processors.images.load import load_image

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "benchmarks"))
import captioning
from captioning import BROKEN, Recipe, encoded, plan, prepare

NUM_IMAGES = 60
SMALL = Recipe("a.jpg", seed=1, width=70, height=40, format="JPEG", options={"quality": 90})


@pytest.fixture
def small_images(monkeypatch):
    monkeypatch.setattr(captioning, "LONGEST", 120)


def files_in(folder: Path) -> dict[str, int]:
    """Modification times in ns by relative path."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*.*")}


def test_the_plan_has_the_documented_mix():
    recipes = plan(2000, seed=0)
    kinds = Counter(recipe.kind for recipe in recipes)
    assert kinds == {"image": 1880, "duplicate": 100} | dict.fromkeys(BROKEN, 5)
    formats = Counter(recipe.format for recipe in recipes if recipe.kind == "image")
    assert [round(formats[name] / 1880, 2) for name in ("JPEG", "PNG", "WEBP")] == pytest.approx(
        [0.70, 0.15, 0.15], abs=0.01
    )
    assert 200 < sum(recipe.options.get("progressive", False) for recipe in recipes) < 500
    assert len({str(Path(recipe.path).parent) for recipe in recipes}) == 4


def test_sizes_are_log_uniform():
    recipes = plan(2000, seed=0)
    longs = [max(recipe.width, recipe.height) for recipe in recipes]
    assert min(longs) == pytest.approx(64, rel=0.01) and max(longs) == pytest.approx(4000, rel=0.01)
    assert median(longs) == pytest.approx((64 * 4000) ** 0.5, rel=0.05)
    aspects = [recipe.width / recipe.height for recipe in recipes]
    assert 0.38 < min(aspects) < 0.45 and 2.2 < max(aspects) < 2.6


@pytest.mark.parametrize("step", [2, 5, 10, 20])
def test_an_even_sample_has_the_sizes_of_all_files(step):
    pixels = np.sort([recipe.width * recipe.height for recipe in plan(2000, seed=0)[::step]])
    every = np.sort([recipe.width * recipe.height for recipe in plan(2000, seed=0)])
    assert pixels.mean() == pytest.approx(every.mean(), rel=0.2)


def test_a_plan_is_sorted_and_follows_its_seed():
    paths = [recipe.path for recipe in plan(500, seed=3)]
    assert paths == sorted(set(paths))
    assert plan(500, seed=3) == plan(500, seed=3) != plan(500, seed=4)


@pytest.mark.parametrize("kind", BROKEN[:3])
@pytest.mark.parametrize("image_format", captioning.SUFFIXES)
def test_broken_files_cannot_be_loaded(kind, image_format):
    with pytest.raises(ValueError, match=r"is empty|not an image|damaged or truncated"):
        load_image(encoded(replace(SMALL, format=image_format, options={}, kind=kind)))


def test_a_file_with_a_wrong_suffix_is_a_complete_image():
    (misnamed,) = [recipe for recipe in plan(400, seed=0) if recipe.kind == "wrong suffix"]
    assert Path(misnamed.path).suffix != captioning.SUFFIXES[misnamed.format]
    assert load_image(encoded(replace(misnamed, width=70, height=40))).size == (70, 40)


def test_images_have_grain_and_differ_by_seed():
    one, other = (np.asarray(captioning.paint(replace(SMALL, seed=seed)), dtype=float) for seed in (1, 2))
    assert one.shape == (40, 70, 3) and abs(one - other).mean() > 2
    assert (np.diff(one, axis=1) != 0).mean() > 0.5


@pytest.mark.spawns
def test_a_folder_is_created_once_and_reused(tmp_path, small_images):
    recipes = prepare(tmp_path, NUM_IMAGES, seed=0)
    made = files_in(tmp_path)
    assert made.keys() == {recipe.path for recipe in recipes} | {"manifest.json"}
    for recipe in recipes:
        if recipe.kind in ("image", "duplicate"):
            assert load_image(tmp_path / recipe.path).size == (recipe.width, recipe.height)
    assert prepare(tmp_path, NUM_IMAGES, seed=0) == recipes and files_in(tmp_path) == made


def test_duplicates_have_the_pixels_of_an_original():
    recipes = [replace(recipe, width=50, height=30) for recipe in plan(200, seed=0)]
    for duplicate in [recipe for recipe in recipes if recipe.kind == "duplicate"]:
        (original,) = [other for other in recipes if other.seed == duplicate.seed and other.kind == "image"]
        pixels = [load_image(encoded(recipe)).tobytes() for recipe in (original, duplicate)]
        assert pixels[0] == pixels[1] and original.path != duplicate.path


def test_a_folder_with_other_files_is_refused(tmp_path, capsys):
    (tmp_path / "holiday.jpg").write_bytes(b"mine")
    with pytest.raises(SystemExit):
        captioning.main(["--folder", str(tmp_path), "--images", "4"])
    assert "has files, but not 4 images of seed 0; empty it or give another folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.jpg"]


def test_a_negative_sample_is_refused(capsys):
    with pytest.raises(SystemExit):
        captioning.main(["--sample", "-1"])
    assert "--sample must be at least 0, got -1" in capsys.readouterr().err


@pytest.mark.slow
def test_all_methods_give_the_same_captions(tmp_path, small_images, capsys):
    output = tmp_path / "results.jsonl"
    options = {"--images": NUM_IMAGES, "--sample": 12, "--max-tokens": 6, "--rounds": 2, "--json": output}
    captioning.main([str(part) for option in options.items() for part in option])
    lines = capsys.readouterr().out.splitlines()
    assert output.read_text().splitlines() == lines[-1:]
    made = json.loads(lines[-1])
    results, num_broken = made["results"], made["mix"]["truncated"]
    assert [way["files"] for way in results.values()] == [NUM_IMAGES, 12, 12]
    assert [way["other_captions"] for way in results.values()] == [0, 0, 0]
    assert results["caption_images"]["failed"] == num_broken == 1
    assert all(way["images_per_second"] > 0 and way["tokens_per_second"] > 0 for way in results.values())
    assert 0 <= results["caption_images"]["engine_wait_share"] <= 1 and len(made["rounds"]) == 2
    assert made["mix"]["duplicate"] == 3 and any(line.startswith("  plain loop") for line in lines)
