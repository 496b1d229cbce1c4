"""Damaged and hostile videos give the frames that there are, or a VideoError; nothing else is read, no process dies."""

import io
import random
import socket
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import pytest
from PIL import Image

from mmvllm.errors import VideoError
from mmvllm.media.policy import MediaPolicy
from mmvllm.processors.videos.limits import ANY_VIDEO, VideoLimits
from mmvllm.processors.videos.load import load_video, load_video_info
from mmvllm.processors.videos.stream import VideoStream
from tests.helpers.media.videos import FramesAt, full_decode, make_clip
from tests.helpers.needs import needs

CLIPS = [
    ("a.mp4", "libx264", {}),
    ("fast.mp4", "libx264", {"movflags": "faststart"}),
    ("fragments.mp4", "libx264", {"movflags": "frag_keyframe+empty_moov"}),
    ("hevc.mp4", "libx265", {"movflags": "faststart"}),
    ("av1.mp4", "libsvtav1", {"movflags": "faststart"}),
    ("vp9.webm", "libvpx-vp9", {}),
    ("a.mkv", "libx264", {}),
    ("a.avi", "mpeg4", {}),
]
UNTRUSTED = MediaPolicy().video_limits


@pytest.fixture(params=CLIPS, ids=lambda clip: clip[0])
def clip(request, tmp_path) -> bytes:
    name, codec, options = request.param
    return make_clip(tmp_path / name, 24, codec=codec, options=options).read_bytes()


def load(data: bytes, limits: VideoLimits = ANY_VIDEO) -> int:
    """The number of frames, or 0 for an error."""
    try:
        clip = load_video(data, FramesAt(size=(28, 28)), limits)
    except VideoError as error:
        assert str(error).startswith(f"the video of {len(data)} bytes: ") and error.__context__ is None
        return 0
    assert len(clip.frames) == clip.info.total_num_frames
    return len(clip.frames)


@pytest.mark.thinned(4)
def test_a_truncated_video_gives_the_frames_that_there_are(clip):
    lengths = range(0, len(clip), max(1, len(clip) // 20))
    numbers = [load(clip[:length]) for length in lengths]
    assert load(clip) == 24 and numbers[0] == 0 and max(numbers) <= 24


@pytest.mark.parametrize("name", ["fast.mp4", "fragments.mp4", "a.mkv", "vp9.webm", "a.avi"])
def test_the_frames_before_the_end_are_intact(name, tmp_path, caplog):
    codec, options = next(one[1:] for one in CLIPS if one[0] == name)
    path = make_clip(tmp_path / name, 48, codec=codec, options=options)
    full = full_decode(path)
    clip = load_video(path.read_bytes()[: path.stat().st_size * 2 // 3], FramesAt())
    assert 16 <= len(clip.frames) < 48 and clip.info.fps == 8
    for i in range(len(clip.frames) - 4):  # at the end the decoder may lack frames that are decoded later
        assert (clip.frames[i] == full[i][1]).all()


@pytest.mark.parametrize(
    ("name", "rest"), [("fast.mp4", "zeros"), ("fast.mp4", "noise"), ("hevc.mp4", "noise"), ("av1.mp4", "zeros")]
)
def test_an_end_that_cannot_be_decoded_is_no_copy_of_the_last_frame(name, rest, tmp_path, caplog):
    """A download that ended early leaves such a file if its space was allocated before."""
    codec, options = next(one[1:] for one in CLIPS if one[0] == name)
    path = make_clip(tmp_path / name, 80, codec=codec, options=options)
    full, data = full_decode(path), path.read_bytes()
    cut = len(data) // 2
    data = data[:cut] + (bytes(len(data) - cut) if rest == "zeros" else random.Random(0).randbytes(len(data) - cut))
    clip = load_video(data, FramesAt())
    number = len(clip.frames)
    assert number == clip.info.total_num_frames and 20 <= number < 60
    for i in range(20):
        assert (clip.frames[i] == full[i][1]).all()
    assert any("but only" in message for message in caplog.messages)
    caplog.clear()
    assert len(load_video(data, FramesAt(), UNTRUSTED).frames) == number and not caplog.messages
    with pytest.raises(VideoError, match="cannot be decoded"):
        load_video(data, FramesAt((79,)))


def grown(size: tuple[int, int], path: Path) -> bytes:
    """Make a clip of ten frames of 64 x 64 and five frames of another size."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mjpeg", rate=8, width=64, height=64, pix_fmt="yuvj420p")
        for i in range(15):
            buffer = io.BytesIO()
            Image.new("RGB", (64, 64) if i < 10 else size, (i * 10, 0, 0)).save(buffer, "JPEG")
            packet = av.Packet(buffer.getvalue())
            packet.stream, packet.pts, packet.dts, packet.duration = stream, i, i, 1
            packet.time_base, packet.is_keyframe = Fraction(1, 8), True
            container.mux(packet)
    return path.read_bytes()


def test_frames_may_grow_up_to_the_limit(tmp_path):
    limits = VideoLimits(max_frame_pixels=10_000)
    clip = load_video(grown((100, 100), tmp_path / "a.avi"), FramesAt(), limits)
    assert clip.frames.shape == (15, 64, 64, 3)
    with pytest.raises(VideoError, match="has frames of 101x100, more than 10000 pixels; shrink it first"):
        load_video(grown((101, 100), tmp_path / "b.avi"), FramesAt(), limits)
    # Refused by the decoder, before it takes memory for it.
    assert len(load_video(grown((200, 200), tmp_path / "c.avi"), FramesAt(), limits).frames) == 10


@pytest.mark.thinned(1)
def test_flipped_bytes_do_no_harm(clip):
    rng = random.Random(0)
    for _ in range(25):
        damaged = bytearray(clip)
        for _ in range(rng.choice((1, 3, 10, 100))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        load(bytes(damaged))
        load(bytes(damaged), UNTRUSTED)


def test_a_damaged_part_in_the_middle_is_ignored(tmp_path):
    path = make_clip(tmp_path / "a.mkv", 64, gop=8)
    full = full_decode(path)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 300] = bytes(300)
    clip = load_video(bytes(data), FramesAt((0, 8, 56, 63)))
    for index, frame in zip(clip.indices, clip.frames, strict=True):
        assert (frame == full[index][1]).all()


@pytest.mark.parametrize("data", [bytes(1000), b"no video", b"\0\0\0\x18ftypmp42", b"RIFF\0\0\0\0AVI LIST", bytes(1)])
def test_what_is_no_video_is_refused(data):
    for limits in (ANY_VIDEO, UNTRUSTED):
        with pytest.raises(VideoError, match="is not a video"):
            load_video_info(data, limits)


@pytest.mark.parametrize("suffix", [".txt", ".nfo", ".ans", ".asc", ".diz", ".xb", ".adf", ".idf", ".bin"])
def test_a_text_is_no_video(suffix, tmp_path):
    path = tmp_path / f"notes{suffix}"
    path.write_text("Remember the milk.\n" * 500)
    with pytest.raises(VideoError, match="is not a video"):
        load_video_info(path)


def test_nothing_is_written_to_the_terminal(clip, capfd):
    load(clip[: len(clip) // 2])
    damaged = bytearray(clip)
    damaged[len(clip) // 2 :: 50] = bytes(len(damaged[len(clip) // 2 :: 50]))
    load(bytes(damaged))
    assert capfd.readouterr() == ("", "")


# Files that name others


@pytest.fixture
@needs("network")
def loopback() -> Iterator[socket.socket]:
    """A socket that waits for connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def assert_reached_by_none(server: socket.socket) -> None:
    with pytest.raises(BlockingIOError):
        server.accept()


PLAYLISTS = {
    "hls": "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{}\n#EXT-X-ENDLIST\n",
    "concat": "ffconcat version 1.0\nfile '{}'\n",
    "dash": '<?xml version="1.0"?><MPD type="static" mediaPresentationDuration="PT3S"><Period><AdaptationSet '
    'mimeType="video/mp4"><Representation id="1"><BaseURL>{}</BaseURL></Representation></AdaptationSet></Period></MPD>',
    "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\na={}\n",
    "url": "[InternetShortcut]\nURL={}\n",
}


@pytest.mark.parametrize("kind", PLAYLISTS)
def test_a_playlist_reads_nothing(kind, tmp_path, loopback):
    url = "http://{}:{}".format(*loopback.getsockname())
    secret = make_clip(tmp_path / "secret.mp4", 4)
    for target in (secret, f"file:{secret}", f"{url}/a.mp4", f"{url}/a.ts", f"subfile,,start,0,end,0,,:{secret}"):
        data = PLAYLISTS[kind].format(target).encode()
        with pytest.raises(VideoError, match="is not a video in mp4, mov, matroska, webm, avi"):
            load_video(data, FramesAt(), UNTRUSTED)
        with pytest.raises(VideoError):
            load_video(data, FramesAt())
    assert_reached_by_none(loopback)


@pytest.mark.parametrize("kind", PLAYLISTS)
def test_a_playlist_of_a_trusted_folder_reaches_no_network(kind, tmp_path, loopback):
    url = "http://{}:{}".format(*loopback.getsockname())
    for suffix in (".m3u8", ".ffconcat", ".mpd", ".sdp", ".mp4"):
        path = tmp_path / f"a{suffix}"
        path.write_text(PLAYLISTS[kind].format(f"{url}/a.ts"))
        with pytest.raises(VideoError):
            load_video(path, FramesAt())
    assert_reached_by_none(loopback)


@pytest.mark.parametrize("kind", ["hls", "concat"])
def test_a_playlist_of_a_trusted_folder_opens_no_file(kind, tmp_path):
    part = make_clip(tmp_path / "part.ts", 4, codec="libx264")
    assert load_video(part, FramesAt((3,))).frames.shape == (1, 64, 96, 3)
    for suffix in (".m3u8", ".ffconcat", ".mp4"):
        for target in ("part.ts", str(part)):
            path = tmp_path / f"a{suffix}"
            path.write_text(PLAYLISTS[kind].format(target))
            with pytest.raises(VideoError, match="is not a video that FFmpeg can read"):
                load_video(path, FramesAt())


def test_a_container_or_codec_that_is_not_allowed_is_refused(tmp_path):
    for name, codec, message in (
        ("a.mpg", "mpeg2video", "is not a video in mp4, mov"),
        ("a.ts", "libx264", "is not a video in mp4, mov"),
        ("a.mkv", "mpeg2video", "its codec mpeg2video is not accepted; use h264, hevc, vp8"),
        ("a.mkv", "ffv1", "its codec ffv1 is not accepted; use h264, hevc, vp8"),
    ):
        path = make_clip(tmp_path / name, 4, codec=codec)
        assert load_video(path, FramesAt((3,))).frames.shape == (1, 64, 96, 3)
        with pytest.raises(VideoError, match=message):
            load_video(io.BytesIO(path.read_bytes()), FramesAt(), UNTRUSTED)


def test_the_limits_are_checked_before_frames_are_taken(tmp_path):
    data = make_clip(tmp_path / "a.mp4", 24).read_bytes()
    size = 64 * 96
    assert len(load_video(data, FramesAt(), VideoLimits((), (), (), size, 24 * size, 3.0)).frames) == 24
    for limits, message in (
        (VideoLimits(max_frame_pixels=size - 1), "has frames of 96x64, more than 6143 pixels; shrink it first"),
        (VideoLimits(max_pixels=24 * size - 1), "24 frames of 96x64 are more than 147455 pixels; take fewer or shrink"),
        (VideoLimits(max_seconds=2.9), r"lasts 3 s, more than 2\.9 s; cut it first"),
    ):
        with pytest.raises(VideoError, match=message):
            load_video(data, FramesAt(), limits)


def test_the_size_in_the_header_is_checked_before_a_frame_is_decoded(tmp_path, monkeypatch):
    data = make_clip(tmp_path / "a.mp4", 24).read_bytes()
    monkeypatch.setattr(VideoStream, "begin", lambda self: pytest.fail("a frame was decoded"))
    with pytest.raises(VideoError, match="has frames of 96x64, more than 100 pixels; shrink it first"):
        load_video(data, FramesAt(), VideoLimits(max_frame_pixels=100))
