"""What is shown below the message box before a question is asked: what is taken of its videos, and its tokens."""

import html

from mmvllm.demo.videos import UploadedVideo
from mmvllm.utils.text import counted


def estimate(videos: list[tuple[UploadedVideo, int]], note: str) -> str:
    """HTML: the number of frames that are taken of each video, with a few of them, and the note on tokens."""
    return "".join(_clip(video, num_frames) for video, num_frames in videos) + note


def _clip(video: UploadedVideo, num_frames: int) -> str:
    name, length = html.escape(video.path.name), spoken_time(video.info.duration)
    taken = f"<b>{name}</b> lasts {length}; the model sees {counted(num_frames, 'frame')}"
    some = ", some of which are:" if num_frames > len(video.strip) else ":"
    frames = "".join(
        f'<figure><img src="{data}" alt="Frame at {spoken_time(time)}"><figcaption>{spoken_time(time)}</figcaption>'
        "</figure>"
        for time, data in video.strip
    )
    return f'<div class="clip"><p>{taken}{some}</p><div class="strip">{frames}</div></div>'


def spoken_time(seconds: float) -> str:
    """ "7.5 s", or minutes and seconds: "1:05 min"."""
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"
