"""`mmvllm bench preprocess --video`: the cost of a sampled frame, beside full decoding by PyAV and by OpenCV."""

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from statistics import median

import numpy as np
import torch

from mmvllm.bench.measures import waiting_seconds
from mmvllm.bench.report import number, percent, print_table, record
from mmvllm.bench.runs import Mmvllm
from mmvllm.bench.workload import smooth_noise
from mmvllm.entrypoints.llm import LLM
from mmvllm.models.folder import resolve_folder
from mmvllm.models.registry import load_media_configs
from mmvllm.processors.videos.clip import VideoInfo
from mmvllm.processors.videos.load import load_video, load_video_info
from mmvllm.processors.videos.processor import ClipPlan, Resize, resize_frame, resized_to

SECONDS, FPS, SIZE, GOP = 20, 30, (1280, 720), 60  # of the generated clip
NUM_CLIPS, OUTPUT_TOKENS = 4, 33  # of the engine's run

Reader = Callable[[str, list[int], list[Resize]], int]  # path, indices, sizes -> number of frames


def run(args: argparse.Namespace) -> dict:
    """Print the table and return the record."""
    folder = resolve_folder(args.model, with_weights=False)
    with tempfile.TemporaryDirectory() as temporary:
        path = _generated(Path(temporary) / "clip.mp4") if args.video is True else args.video
        info, config = load_video_info(path), load_media_configs(folder)[1]
        results = [_measure(str(path), info, ClipPlan(config, fps=fps), args.repeat) for fps in args.video_fps]
        waited = _share_waited(folder, path)
    _print(results, info, args)
    engine = {"clips": NUM_CLIPS, "output_tokens": OUTPUT_TOKENS, "waiting_for_preparation": waited}
    print(
        f"an engine with this model's shapes waited for the frames of {NUM_CLIPS} clips {percent(waited)} of the time"
    )
    return record(args, torch.device("cpu"), None, results=results, engine=engine)


def _generated(path: Path) -> Path:
    """Write a clip with motion, and return its path."""
    import av

    image = np.asarray(smooth_noise(*SIZE, seed=[0]))
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(FPS), options={"preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = *SIZE, "yuv420p"
        stream.codec_context.gop_size = GOP
        for i in range(SECONDS * FPS):
            frame = av.VideoFrame.from_ndarray(np.roll(image, 2 * i, axis=1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def _measure(path: str, info: VideoInfo, plan: ClipPlan, repeat: int) -> dict:
    """Measure the seconds of each reader for the same frames and size, in turns; the first turn is a warm-up."""
    indices = plan.frame_indices(info)
    sizes = plan.sizes(len(indices), info.height, info.width)
    readers: dict[str, Reader] = {"mmvllm": lambda *_: len(load_video(path, plan).frames), "PyAV": _all_by_pyav}
    with suppress(ImportError):
        import cv2  # noqa: F401

        readers["OpenCV"] = _all_by_opencv
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(repeat + 1):
        for name, read in readers.items():
            start = time.perf_counter()
            read(path, indices, sizes)
            seconds[name].append(time.perf_counter() - start)
    height, width = resized_to(sizes, info.height, info.width)
    return {
        "fps": plan.fps,
        "frames": len(indices),
        "size": f"{width}x{height}",
        "seconds_per_frame": {name: median(times[1:]) / len(indices) for name, times in seconds.items()},
    }


def _all_by_pyav(path: str, indices: list[int], sizes: list[Resize]) -> int:
    import av

    wanted = set(indices)
    with av.open(path) as container:
        frames = enumerate(container.decode(video=0))
        return len([resize_frame(one.to_ndarray(format="rgb24"), sizes) for i, one in frames if i in wanted])


def _all_by_opencv(path: str, indices: list[int], sizes: list[Resize]) -> int:
    import cv2

    video, frames, wanted, i = cv2.VideoCapture(path, cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1]), [], set(indices), 0
    while video.grab():
        if i in wanted:
            frames.append(resize_frame(cv2.cvtColor(video.retrieve()[1], cv2.COLOR_BGR2RGB), sizes))
        i += 1
    return len(frames)


def _share_waited(folder: Path, path: Path) -> float:
    """Return the share of time that an engine with random weights waits for preparation, with one clip per request."""
    numbers = range(8, 8 + 2 * NUM_CLIPS, 2)
    with LLM(folder, load_format="dummy", max_num_seqs=NUM_CLIPS) as llm:
        rules = llm.engine.media_rules
        prompt = {"text": f"{rules.start}{rules.video}{rules.end}", "videos": [path]}
        requests = [{**prompt, "mm_processor_kwargs": {"num_frames": number}} for number in numbers]
        run = Mmvllm(llm).run(requests, OUTPUT_TOKENS)
    return waiting_seconds(run) / run.seconds


def _print(results: list[dict], info: VideoInfo, args: argparse.Namespace) -> None:
    names = list(results[0]["seconds_per_frame"])
    header = ["frames", "size", *(f"{name} ms" for name in names), *(f"{name} ratio" for name in names[1:])]
    rows = []
    for case in results:
        costs = case["seconds_per_frame"]
        ratios = [number(costs[name] / costs["mmvllm"]) for name in names[1:]]
        cells = [str(case["frames"]), case["size"], *(number(cost, 1000) for cost in costs.values()), *ratios]
        rows.append([f"at {case['fps']:g} frames/s", *cells])
    name = "a generated clip" if args.video is True else args.video
    video = f"{name}, {info.total_num_frames} frames of {info.width}x{info.height}"
    print_table(f"{video}: one sampled frame, median of {args.repeat}", header, rows)
    print("mmvllm seeks; PyAV and OpenCV decode all frames; each with one thread")
    if "OpenCV" not in names:
        print("OpenCV is not installed (opencv-python-headless): it was not measured")
