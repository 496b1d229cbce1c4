"""Turns requests for items into engine inputs with facts for their records, in threads or worker processes."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from PIL.Image import Image

from mmvllm.captioning.outputs.record import TRUNCATED
from mmvllm.captioning.sources.items import Item, item_of
from mmvllm.captioning.sources.loading import ItemLoader, Loader, LoaderInWorker, run_for
from mmvllm.errors import ArgumentError
from mmvllm.inputs import EngineInput
from mmvllm.processes.pool import WorkerPool
from mmvllm.processors.budget import DECODING
from mmvllm.processors.chat.hf_processor import HFProcessor
from mmvllm.processors.chat.processor import Processor
from mmvllm.processors.digest import digest_of
from mmvllm.processors.images.decode import is_truncated
from mmvllm.processors.images.draft import Draft, source_size
from mmvllm.processors.videos.clip import Clip, VideoInfo
from mmvllm.processors.videos.load import Load
from mmvllm.processors.videos.processor import ClipPlan
from mmvllm.processors.videos.qwen_vl_utils import TOTAL_TOKENS

CONTEXT_SHARE = 0.75  # of the model's context length, for the frames of a clip


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionInput(EngineInput):
    """The engine input for an image or clip; `media_info` has the fields `record.MEDIA_INFO` of its record.

    `others` are the inputs with the job's further prompts and the same image or clip.
    """

    media_info: dict[str, Any]
    others: tuple[EngineInput, ...] = ()


class CaptionPreparer:
    """Prepares requests whose image or video is an `Item`; raises RequestError for one that cannot be used."""

    def __init__(self, processor: Processor | HFProcessor, loader: Loader):
        self._processor, self._loader = processor, loader

    def __call__(self, request: dict) -> CaptionInput:
        media_info: dict[str, Any] = {}

        def image(item: Item, draft: Draft | None = None) -> Image:
            image = self._loader.image(item, draft)
            media_info.update(image_info(image))
            return image

        def video(item: Item, plan: ClipPlan) -> Clip:
            clip = self._loader.clip(item, _within_context(plan))
            media_info.update(_clip_info(item, clip))
            return clip

        load = Load(_once(image), _once(video))
        if "more" not in request:
            return _caption_input(self._processor(request, load), media_info)
        shared = {key: value for key, value in request.items() if key != "more"}
        requests = [shared, *(shared | {"messages": messages} for messages in request["more"])]
        first, *others = self._processor.together(requests, load)
        return _caption_input(first, media_info, tuple(_with_media_of(first, other) for other in others))


def _caption_input(made: EngineInput, media_info: dict[str, Any], others: tuple[EngineInput, ...] = ()) -> CaptionInput:
    return CaptionInput(
        made.token_ids, made.mm_items, made.positions, made.position_delta, media_info=media_info, others=others
    )


def _once(read: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `read` to read the media of a request once, even if a custom processor asks for each prompt."""
    made: list[Any] = []

    def read_once(*args: Any) -> Any:
        if not made:
            made.append(read(*args))
        return made[0]

    return read_once


def _with_media_of(first: EngineInput, other: EngineInput) -> EngineInput:
    """Return the other input with the patches of the first, which then take memory only once."""
    if [one.digest for one in first.mm_items] != [one.digest for one in other.mm_items]:
        return other  # a custom processor may process an image differently for each prompt
    items = zip(first.mm_items, other.mm_items, strict=True)
    same = (dataclasses.replace(own, patches=one.patches) for one, own in items)
    return dataclasses.replace(other, mm_items=tuple(same))


def image_info(image: Image) -> dict[str, Any]:
    """Return the digest of the decoded pixels (32 hex digits), the size of the upright image, and whether it is cut."""
    digest = digest_of(f"{image.size}".encode(), image.tobytes())
    width, height = source_size(image)
    info = {"digest": digest.hex(), "width": width, "height": height}
    return info | {TRUNCATED: True} if is_truncated(image) else info


def _clip_info(item: Item, clip: Clip) -> dict[str, Any]:
    """Return the digest of the resized, sampled frames and their times, and facts about the clip and its video."""
    info, number = clip.info, len(clip.frames)
    places = (clip.frames.shape, clip.indices, info.fps, info.total_num_frames)  # the prompt has times from them
    digest = digest_of(repr(places).encode(), clip.frames.tobytes())
    start, end = item.start or 0.0, info.duration if item.end is None else min(item.end, info.duration)
    return {
        "digest": digest.hex(),
        "width": info.width,
        "height": info.height,
        "duration": round(info.duration, 3),
        "start": start,
        "end": round(end, 3),
        "num_frames": number,
        "fps": round(number / (end - start), 3),
    }


class FittingPlan(ClipPlan):
    """Shrinks frames, and takes fewer if only their rate is given, to fit into `total_pixels` of its content part."""

    __slots__ = ()

    def frame_indices(self, info: VideoInfo) -> list[int]:
        indices, factor = super().frame_indices(info), self.config.factor
        if "fps" not in self.part:
            return indices
        most, number = self.part["total_pixels"] // factor**2, len(indices)
        unlimited = dataclasses.replace(self, max_tokens=None)
        while (num_tokens := unlimited.num_tokens_of(number, info)) > most and number > 2:
            number = max(2, min(number - 2, int(number * most / num_tokens) // 2 * 2))
        if number == len(indices):
            return indices
        part = {key: value for key, value in self.part.items() if key != "fps"}
        return dataclasses.replace(self, part={**part, "nframes": number}).frame_indices(info)


def _within_context(plan: ClipPlan) -> ClipPlan:
    """Limit the size and number of a plan's frames to leave room for a prompt and a caption."""
    if plan.max_tokens is None:
        return plan
    num_tokens = min(TOTAL_TOKENS, CONTEXT_SHARE * plan.max_tokens)
    keys = {name.name: getattr(plan, name.name) for name in dataclasses.fields(plan)}
    return FittingPlan(**keys | {"part": {**plan.part, "total_pixels": int(num_tokens * plan.config.factor**2)}})


class WorkerProcesses:
    """Runs `CaptionPreparer` in worker processes, which do not share an interpreter lock.

    A request whose process dies is prepared once more, and fails if that process dies too; others are not affected.
    A process that exceeds the time limit is killed.

    Raises ArgumentError for a processor that cannot be pickled.
    """

    def __init__(self, processor: Processor | HFProcessor, num_workers: int, loader: ItemLoader):
        self._timeouts, arguments = loader.timeouts, (processor, loader.accept_truncated)
        try:
            self._pool = WorkerPool(num_workers, _start_worker, arguments, reserve=DECODING.reserve)
        except Exception as error:  # pickling may raise any exception
            raise ArgumentError(
                "{worker_processes} needs a processor that can be pickled: {reason}", reason=error
            ) from error

    def __call__(self, request: dict) -> CaptionInput:
        item = item_of(request["messages"])
        return run_for(item, self._timeouts, self._pool, _prepare_in_worker, request)

    def close(self) -> None:
        """End the worker processes at once."""
        self._pool.close()


_prepare: CaptionPreparer | None = None  # set in a worker process


def _start_worker(processor: Processor | HFProcessor, accept_truncated: bool) -> None:
    global _prepare
    _prepare = CaptionPreparer(processor, LoaderInWorker(accept_truncated))


def _prepare_in_worker(request: dict) -> CaptionInput:
    return _prepare(request)
