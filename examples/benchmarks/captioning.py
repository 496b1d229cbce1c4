"""Batch captioning of a folder of mixed images, compared with two plain loops over the same files.

    python examples/benchmarks/captioning.py

Draws 2,000 images from a seed: the bundled model's scenes with uneven light and grain, 64 to 4000 pixels long, as
JPEG, PNG and WebP in nested folders, about 750 MB; 1 % are broken or misnamed, 5 % duplicates. Three methods run in
turn: `caption_images` on the folder, and, on an even sample of the files, `LLM.generate_multimodal` and transformers
with one image after another. Each run reloads its model, to share no cache, and warms up on other images; both are
excluded from the time. A rate counts every processed file, including broken ones and duplicates. Decoding is greedy, in
float32. Only tokens that the model generated are counted. Peak memory is the process's peak during the run, or since
its start on systems other than Linux, where it cannot be reset.
"""

import argparse
import io
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image, ImageChops

from mmvllm import SamplingParams
from mmvllm.cli.common import at_least_one

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from scenes import DESCRIBE, draw, random_scene

# Only functions import torch, and modules that import it, because the processes that draw images must start fast.

PROMPT = DESCRIBE[0]
WARM_UP = sorted((Path(__file__).resolve().parent.parent / "images").glob("*.png"))[:6]
FOLDERS = ("holiday", "holiday/beach", "products", "scans")
SUFFIXES = {"JPEG": ".jpg", "PNG": ".png", "WEBP": ".webp"}
BROKEN = ("truncated", "empty", "not an image", "wrong suffix")
SHORTEST, LONGEST = 64, 4000  # long sides, in pixels
MAX_ASPECT = 2.5


@dataclass(frozen=True, slots=True)
class Recipe:
    """One file: its path in the folder, the seed and the size of its image, and how it is saved."""

    path: str
    seed: int
    width: int
    height: int
    format: str
    options: dict = field(default_factory=dict)  # arguments of Image.save
    kind: str = "image"  # or "duplicate", or one of BROKEN


def plan(count: int, seed: int) -> list[Recipe]:
    """Return the files of a folder, sorted by path; they depend only on the arguments."""
    rng = random.Random(seed)
    kinds = [BROKEN[i % len(BROKEN)] for i in range(round(0.01 * count))] + ["duplicate"] * round(0.05 * count)
    kinds += ["image"] * (count - len(kinds))
    formats = ["PNG", "WEBP"] * round(0.15 * count)
    formats += ["JPEG"] * (count - len(formats))
    rng.shuffle(kinds)
    rng.shuffle(formats)
    recipes = [_recipe(i, count, kinds[i], formats[i], rng) for i in range(count)]
    originals = [recipe for recipe in recipes if recipe.kind == "image"]
    return [_duplicate(recipe, originals, rng) if recipe.kind == "duplicate" else recipe for recipe in recipes]


def _recipe(i: int, count: int, kind: str, image_format: str, rng: random.Random) -> Recipe:
    # Steps of the golden ratio spread the sizes evenly over any part of the files, which gives a sample the same mix.
    side = SHORTEST * (LONGEST / SHORTEST) ** ((0.5 + i * 0.6180339887) % 1)
    aspect = MAX_ASPECT ** rng.uniform(-1, 1)
    width, height = round(side * min(1, aspect)), round(side / max(1, aspect))
    suffix = SUFFIXES[image_format]
    if kind == "wrong suffix":
        suffix = ".webp" if image_format == "JPEG" else ".jpg"
    path = f"{FOLDERS[i * len(FOLDERS) // count]}/{i:06}{suffix}"
    options = {
        "JPEG": {"quality": rng.randint(85, 95), "progressive": rng.random() < 0.25},
        "PNG": {"compress_level": 3},
        "WEBP": {"quality": rng.randint(85, 95), "method": 1},
    }
    return Recipe(path, rng.getrandbits(32), width, height, image_format, options[image_format], kind)


def _duplicate(recipe: Recipe, originals: list[Recipe], rng: random.Random) -> Recipe:
    """Return an original under another name: about half are recompressed PNGs, the others identical files."""
    original = rng.choice(originals)
    pngs = [other for other in originals if other.format == "PNG"]
    if pngs and rng.random() < 0.5:
        original = replace(rng.choice(pngs), options={"compress_level": 1})
    path = str(PurePosixPath(recipe.path).with_suffix(SUFFIXES[original.format]))
    return replace(original, path=path, kind="duplicate")


def paint(recipe: Recipe) -> Image.Image:
    """Paint a scene of the recipe's size, with light and grain that make its file about as large as a photograph's."""
    rng, noise = random.Random(recipe.seed), np.random.default_rng(recipe.seed)
    width, height = recipe.width, recipe.height
    image = draw(replace(random_scene(rng), width=width, height=height), rng)
    light = Image.fromarray(noise.integers(104, 153, (5, 5), dtype=np.uint8))
    light = Image.merge("RGB", [light.resize((width, height), Image.Resampling.BICUBIC)] * 3)
    tile = noise.normal(128, rng.uniform(2, 8), (256, 256, 3)).clip(0, 255).astype(np.uint8)
    grain = np.tile(tile, (height // 256 + 1, width // 256 + 1, 1))[:height, :width]
    return ImageChops.add(ImageChops.add(image, light, offset=-128), Image.fromarray(grain), offset=-128)


def encoded(recipe: Recipe) -> bytes:
    """Return the content of the file, damaged according to its kind."""
    if recipe.kind in ("empty", "not an image"):
        return b"<html>404 Not Found</html>\n" if recipe.kind == "not an image" else b""
    file = io.BytesIO()
    paint(recipe).save(file, format=recipe.format, **recipe.options)
    data = file.getvalue()
    return data[: len(data) // 2] if recipe.kind == "truncated" else data


def write(path: Path, recipe: Recipe) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(recipe))


def prepare(folder: Path, count: int, seed: int) -> list[Recipe]:
    """Write the images, then the manifest; reuse an equal folder, and raise ValueError for one with other files."""
    recipes, manifest, start = plan(count, seed), folder / "manifest.json", time.perf_counter()
    text = json.dumps([asdict(recipe) for recipe in recipes], indent=1)
    if manifest.is_file() and manifest.read_text() == text:
        return recipes
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} has files, but not {count} images of seed {seed}; empty it or give another folder")
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(write, [folder / recipe.path for recipe in recipes], recipes, chunksize=8))
    manifest.write_text(text)
    print(f"{count} images drawn in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    return recipes


@dataclass(slots=True)
class Measurement:
    """The results of a method, (caption or None, number of tokens) by path, with time and memory."""

    answers: dict[str, tuple[str | None, int]]
    engine_wait_share: float | None = None  # not measured for the loops
    seconds: float = 0.0
    peak_memory: int | None = None


Method = Callable[[list[Path]], Measurement]


def batch(args: argparse.Namespace, stack: ExitStack) -> Method:
    """Caption files or the folder with `caption_images`."""
    from mmvllm.captioning import caption_images

    llm = open_llm(args, stack)
    options = {"max_tokens": args.max_tokens, "max_pixels": args.max_pixels, "workers": args.workers}

    def method(paths: list[Path]) -> Measurement:
        records, measurement = caption_images(paths, llm=llm, prompt=PROMPT, **options), Measurement({})
        for made in records:
            # The record of a duplicate has the token count of the caption that is copied.
            measurement.answers[made["path"]] = (
                made["caption"],
                0 if made["duplicate_of"] else made["completion_tokens"],
            )
        measurement.engine_wait_share = records.progress.engine_wait_share
        return measurement

    return method


def loop(args: argparse.Namespace, stack: ExitStack) -> Method:
    """Caption one image after another with the same engine."""
    llm, params = open_llm(args, stack), SamplingParams(max_tokens=args.max_tokens)

    def answer(path: Path) -> tuple[str | None, int]:
        asked = request(path) | {"max_pixels": args.max_pixels}
        output = llm.generate_multimodal([asked], params, use_tqdm=False, on_error="return")[0]
        return None if output.error else output.text.strip(), len(output.token_ids)

    return lambda paths: Measurement({str(path): answer(path) for path in paths})


def reference(args: argparse.Namespace, stack: ExitStack) -> Method:
    """Caption one image after another with transformers."""
    import torch
    from transformers import AutoTokenizer

    from mmvllm.bench.reference import Transformers, image_processor
    from mmvllm.config import EngineConfig
    from mmvllm.models.folder import resolve_folder
    from mmvllm.models.registry import load_config, load_image_config
    from mmvllm.processors.images.bounds import pixel_bounds

    folder, device = resolve_folder(args.model), EngineConfig().resolve_device()
    tokenizer, images = AutoTokenizer.from_pretrained(folder), load_image_config(folder)
    transformers = Transformers(folder, tokenizer, device, torch.float32, "auto", batch_size=1)
    low, high = pixel_bounds(None, args.max_pixels, images.min_pixels, images.max_pixels)
    transformers.images = image_processor(folder, min_pixels=low, max_pixels=high)
    ends = sorted(load_config(folder).eos_token_ids)

    def answer(path: Path) -> tuple[str | None, int]:
        try:
            inputs = transformers.inputs([request(path.read_bytes())]).to(device)
        except Exception:  # Pillow's readers raise exceptions of many types on damaged files
            return None, 0
        made = transformers.model.generate(**inputs, max_new_tokens=args.max_tokens, eos_token_id=ends)
        tokens = made[0, inputs["input_ids"].shape[1] :].tolist()
        return tokenizer.decode(tokens, skip_special_tokens=True).strip(), len(tokens)

    return lambda paths: Measurement({str(path): answer(path) for path in paths})


METHODS = {"caption_images": batch, "plain loop": loop, "transformers": reference}


def request(image: Path | bytes) -> dict:
    content = [{"type": "image", "image": image}, {"type": "text", "text": PROMPT}]
    return {"messages": [{"role": "user", "content": content}]}


def open_llm(args: argparse.Namespace, stack: ExitStack):
    from mmvllm import LLM

    llm = LLM(args.model, dtype="float32")
    stack.callback(llm.exit)
    return llm


def measure_method(name: str, paths: list[Path], args: argparse.Namespace) -> Measurement:
    """Load a method's model, warm it up, and measure it on the files."""
    import torch

    from mmvllm.bench.runs import peak_memory, reset_peak_memory

    host = torch.device("cpu")  # the host's memory is measured, also if the device is a GPU
    with ExitStack() as stack:
        method = METHODS[name](args, stack)
        method(WARM_UP)
        reset_peak_memory(host)
        start = time.perf_counter()
        measurement = method(paths)
        measurement.seconds, measurement.peak_memory = time.perf_counter() - start, peak_memory(host)
    print(f"{name}: {len(measurement.answers)} files, {measurement.seconds:.2f} s", file=sys.stderr)
    return measurement


def measures(measurement: Measurement, baseline: Measurement, sizes: dict[str, int]) -> dict[str, float | None]:
    """Return the reported numbers; `sizes` are bytes by path. Captions are compared with the `baseline`'s."""
    captions = {path: caption for path, (caption, _) in measurement.answers.items()}
    return {
        "files": len(captions),
        "bytes": sum(sizes[path] for path in captions),
        "failed": list(captions.values()).count(None),
        "other_captions": sum(caption != baseline.answers[path][0] for path, caption in captions.items()),
        "seconds": measurement.seconds,
        "images_per_second": len(captions) / measurement.seconds,
        "tokens_per_second": sum(tokens for _, tokens in measurement.answers.values()) / measurement.seconds,
        "engine_wait_share": measurement.engine_wait_share,
        "peak_memory_bytes": measurement.peak_memory,
    }


def run(folder: Path, recipes: list[Recipe], args: argparse.Namespace) -> None:
    """Run the methods in turn; print the table and the record."""
    from mmvllm.bench.measures import medians
    from mmvllm.bench.report import emit, record
    from mmvllm.config import EngineConfig

    files, rounds = [folder / recipe.path for recipe in recipes], []
    # Reading all files also brings them into the system's cache, which puts all methods on equal terms.
    sizes = {str(path): len(path.read_bytes()) for path in files}
    num_sampled = min(args.sample or len(files), len(files))
    sample = [files[i * len(files) // num_sampled] for i in range(num_sampled)]
    for _ in range(args.rounds):
        made = {name: measure_method(name, [folder] if METHODS[name] is batch else sample, args) for name in METHODS}
        rounds.append({name: measures(one, made["caption_images"], sizes) for name, one in made.items()})
    results, mix = medians(rounds), Counter(recipe.format for recipe in recipes)
    mix["progressive"] = sum(recipe.options.get("progressive", False) for recipe in recipes)
    mix += Counter(recipe.kind for recipe in recipes if recipe.kind != "image")
    print(f"{len(files)} files: {', '.join(f'{count} {name}' for name, count in mix.items())}")
    print_results(results)
    device = EngineConfig().resolve_device()
    emit(record(args, device, None, mix=mix, results=results, rounds=rounds), args.json)


def print_results(results: dict[str, dict]) -> None:
    from mmvllm.bench.report import number, percent, print_table

    ours, rows = results["caption_images"], []
    for name, method in results.items():
        counts = [f"{method[key]:.0f}" for key in ("files", "failed", "other_captions")]
        rates = [number(method[key]) for key in ("seconds", "images_per_second", "tokens_per_second")]
        ratio = number(ours["images_per_second"] / method["images_per_second"])
        sizes = [number(method[key], 1e-6) for key in ("bytes", "peak_memory_bytes")]
        rows.append([name, *counts, *rates, ratio, *sizes])
    header = ["files", "failed", "other captions", "seconds", "images/s", "tokens/s", "ratio", "MB", "peak MB"]
    print_table("method", header, rows)
    share = percent(ours["engine_wait_share"])
    print(
        f"ratio: images/s of caption_images by images/s of the method; its engine waited for images {share} of the time"
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(benchmark="captioning")
    parser.add_argument("--images", type=at_least_one, default=2000)
    parser.add_argument("--folder", type=Path, help="make and keep the images here (default: a temporary folder)")
    parser.add_argument("--model", help="checkpoint folder or hub id (default: the small bundled model)")
    parser.add_argument("--max-tokens", type=at_least_one, default=64)
    parser.add_argument("--max-pixels", type=at_least_one, help="largest area of an image (default: the checkpoint's)")
    parser.add_argument(
        "--workers", type=at_least_one, help="threads of caption_images (default: one per core, at most 8)"
    )
    parser.add_argument(
        "--sample", type=int, default=200, help="files for each plain loop, 0 for all (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=at_least_one, default=1, help="runs of each method; medians are printed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the last line to this file")
    args = parser.parse_args(argv)
    if args.sample < 0:
        parser.error(f"--sample must be at least 0, got {args.sample}")
    with ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(TemporaryDirectory(prefix="captioning-")))
        try:
            recipes = prepare(folder, args.images, args.seed)
        except ValueError as error:
            parser.error(str(error))
        run(folder, recipes, args)


if __name__ == "__main__":
    main()
