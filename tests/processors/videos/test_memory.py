"""A long video takes memory for the frames that are kept, and little more."""

import gc
import os
import subprocess
import sys

import av
import pytest

from mmvllm.processors.videos.load import load_video
from tests.helpers.media.videos import FramesAt, make_clip, make_long_clip

MiB = 1024 * 1024
SECONDS, FRAME_SIZE = 600, (252, 448)
KEPT = 1200 * FRAME_SIZE[0] * FRAME_SIZE[1] * 3
MOST_BEYOND = 160 * MiB  # of the decoder, for 1920x1080, and of the file's index

CODE = """
import sys
from pathlib import Path
from mmvllm.processors.videos.load import load_video
from tests.helpers.media.videos import FramesAt, make_clip

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024

size = (252, 448)
load_video(make_clip(Path(sys.argv[2]), 2), FramesAt((0, 1), size))  # libraries
before = peak()
clip = load_video(sys.argv[1], FramesAt(tuple(range(0, 6_000, 5)), size))
assert clip.info.total_num_frames == 6_000 and clip.frames.shape == (1200, *size, 3)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of the resident size is Linux's")
def test_ten_minutes_of_1080p_at_2_frames_per_second(tmp_path):
    path = make_long_clip(tmp_path / "long.mp4", SECONDS, fps=10, size=(1080, 1920), gop=250)
    command = [sys.executable, "-c", CODE, str(path), str(tmp_path / "small.mp4")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < KEPT + MOST_BEYOND


@pytest.mark.slow
def test_a_decoded_frame_is_freed_at_once(tmp_path):
    """PyAV's frames and their side data may refer to each other, and are large."""
    path = make_clip(tmp_path / "a.mp4", 24, rotation=90)
    gc.collect()
    gc.disable()
    try:
        load_video(path, FramesAt())
        assert sum(type(one) is av.VideoFrame for one in gc.get_objects()) <= 1
    finally:
        gc.enable()
