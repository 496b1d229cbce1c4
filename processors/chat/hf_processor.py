"""Prepare requests with a caller's processor that has the interface of transformers' processors."""

import threading
from dataclasses import replace
from functools import partial
from typing import Any

from PIL.Image import Image

from mmvllm.errors import RequestError
from mmvllm.inputs import EngineInput, MediaRules, MultiModalInput
from mmvllm.processors.chat.parts import naming_media
from mmvllm.processors.chat.processor import check_takes_media, load_clip, rendered, tokenize
from mmvllm.processors.chat.requests import ParsedRequest, parse_request
from mmvllm.processors.chat.special_tokens import SpecialTokens
from mmvllm.processors.chat.template import ChatTemplate
from mmvllm.processors.images.processor import SourceGeometry, resize_for_part
from mmvllm.processors.placeholders import expand_placeholders, place_media
from mmvllm.processors.tensors import NAMES, media_from_tensors, own_grids, own_token_ids
from mmvllm.processors.videos.clip import Clip
from mmvllm.processors.videos.load import DIRECT, Load
from mmvllm.processors.videos.processor import VideoProcessorConfig
from mmvllm.utils.text import counted


class HFProcessor:
    """Adapts an object with the interface of transformers' processors: `apply_chat_template`, and a call with `text`,
    `images`, `return_tensors` and, for requests with videos, `videos`, `video_metadata` and `do_sample_frames`.

    The interface has no pixel bounds, so a request's bounds are applied to images beforehand; the processor's bounds
    follow. Videos are passed as the frames that `VideoProcessor` would use, in their final size. The object's outputs
    may be on any device, and are copied: it may reuse its buffers. It would encode special tokens in messages as
    control tokens; they are refused unless the request has `allow_special_tokens`.

    Args:
        tokenizer: the model's tokenizer, which defines the special tokens.
        video_config: the checkpoint's settings; sides of resized images and frames are multiples of its `factor`.
        max_tokens, load: see `Processor`.
    """

    def __init__(
        self,
        processor,
        tokenizer,
        rules: MediaRules | None,
        video_config: VideoProcessorConfig,
        max_tokens: int | None = None,
        load: Load = DIRECT,
    ):
        self.processor, self.tokenizer, self.rules = processor, tokenizer, rules
        self.video_config, self.max_tokens, self.load = video_config, max_tokens, load
        self._special_tokens, self.chat_template = SpecialTokens(tokenizer), ChatTemplate(processor, rules)
        self._lock = threading.Lock()  # the interface does not guarantee thread safety

    def __reduce__(self):
        """Pickle everything but the lock; the other process creates a new one."""
        return HFProcessor, (
            *(self.processor, self.tokenizer, self.rules, self.video_config, self.max_tokens, self.load),
        )

    def __call__(self, request: dict, load: Load | None = None) -> EngineInput:
        """Prepare one request; raises RequestError that says what is wrong, and where."""
        load = load or self.load
        parsed = parse_request(request)
        check_takes_media(parsed, self.rules)
        for name, value in {"jpeg_draft": parsed.jpeg_draft, "truncate_prompt_tokens": parsed.truncation}.items():
            if value:
                raise RequestError(f"{name} cannot be used with a processor of your own", param=name)
        given = [self._image(i, part, parsed, load) for i, part in enumerate(parsed.images)]
        images = [image for image, _ in given]
        clips = [self._clip(i, part, parsed, load) for i, part in enumerate(parsed.videos)]
        if parsed.token_ids is not None:
            return self._without_media(parsed)
        with self._lock:
            text, marked = rendered(parsed, self.chat_template, self._special_tokens)
            if marked is not None:
                raise RequestError(
                    "messages or chat_template_kwargs have special tokens, which a processor of your own would encode "
                    "as control tokens; remove them, or give allow_special_tokens",
                    param="messages",
                )
            made = self.processor(text=[text], images=images or None, return_tensors="pt", **_videos(clips))
            return replace(self._engine_input(made, [source for _, source in given], clips), text=text)

    def together(self, requests: list[dict], load: Load | None = None) -> list[EngineInput]:
        """Prepare requests like `Processor.together`, but load images and videos for each request."""
        return [self(request, load) for request in requests]

    def _without_media(self, parsed: ParsedRequest) -> EngineInput:
        """Prepare token ids, which the interface does not accept, without the processor; media are refused."""
        if parsed.images or parsed.videos:
            raise RequestError("a processor of your own needs a prompt with media as text, not as token ids")
        token_ids = own_token_ids(parsed.token_ids)
        return EngineInput(token_ids if self.rules is None else expand_placeholders(token_ids, [], self.rules)[0])

    def _image(self, i: int, part: dict, parsed: ParsedRequest, load: Load) -> tuple[Image, SourceGeometry]:
        bounds = dict(zip(("min_pixels", "max_pixels"), parsed.image_bounds, strict=True))
        with naming_media(image_index=i):
            loaded = load.image(part["image"])
            image = resize_for_part(loaded, part, self.video_config.factor)
            return resize_for_part(image, bounds, self.video_config.factor), SourceGeometry.of(loaded)

    def _clip(self, i: int, part: dict, parsed: ParsedRequest, load: Load) -> Clip:
        with naming_media(video_index=i):
            return load_clip(load, part, parsed.video_kwargs[i], self.video_config, self.max_tokens)

    def _engine_input(self, made, sources: list[SourceGeometry], clips: list[Clip]) -> EngineInput:
        token_ids = own_token_ids(_returned(made, "input_ids")[0])
        if self.rules is None:
            return EngineInput(token_ids)
        size = self.video_config.temporal_patch_size
        videos = self._media("video", made, len(clips), seconds=[clip.seconds_per_patch(size) for clip in clips])
        videos = [replace(video, times=clip.patch_times(size)) for video, clip in zip(videos, clips, strict=True)]
        patch_size = self.video_config.patch_size
        images = [
            replace(one, geometry=source.resized_to(one.grid, patch_size))
            for one, source in zip(self._media("image", made, len(sources)), sources, strict=True)
        ]
        media = images + videos
        return place_media(token_ids, media, self.rules, partial(tokenize, self.tokenizer))

    def _media(self, modality: str, made, number: int, **keys: Any) -> list[MultiModalInput]:
        if not number:
            return []
        patches_name, grids_name = NAMES[modality]
        grids = own_grids(_returned(made, grids_name), self.rules.merge_size, grids_name)
        if len(grids) != number:
            raise RequestError(f"the processor returned {len(grids)} {grids_name} for {counted(number, modality)}")
        return media_from_tensors(modality, self.rules, _returned(made, patches_name), grids, **keys)


def _videos(clips: list[Clip]) -> dict[str, Any]:
    """Return the arguments of transformers' processors for videos whose frames are already sampled."""
    if not clips:
        return {}
    metadata = [
        {
            "total_num_frames": clip.info.total_num_frames,
            "fps": clip.info.fps,
            "duration": clip.info.duration,
            "frames_indices": list(clip.indices),
        }
        for clip in clips
    ]
    return {"videos": [clip.frames for clip in clips], "video_metadata": metadata, "do_sample_frames": False}


def _returned(made, name: str) -> Any:
    if name not in made:
        raise RequestError(f"the processor returned no {name}, only {', '.join(made) or 'an empty dict'}")
    return made[name]
