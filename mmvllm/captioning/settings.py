"""The settings of a captioning job: model, prompts, pixel bounds, video sampling, decoding, text around captions."""

import dataclasses
import json
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import xxhash

from mmvllm.captioning.json_captions import schema_text
from mmvllm.captioning.multi_prompt import NamedPrompt, named_prompts
from mmvllm.captioning.presets import DEFAULT_PROMPT, PRESETS
from mmvllm.captioning.sources.context import MODES, check_context
from mmvllm.captioning.sources.items import Item
from mmvllm.errors import ArgumentError
from mmvllm.processors.chat.template_kwargs import check_template_kwargs
from mmvllm.processors.digest import digest_of
from mmvllm.processors.images.bounds import pixel_bounds
from mmvllm.processors.images.load import MAX_SOURCE_PIXELS
from mmvllm.processors.videos.clip import DEFAULT_FPS, MAX_FPS
from mmvllm.sampling_params import MAX_COMPLETIONS, SamplingParams
from mmvllm.utils.arguments import is_number

# Settings that are also options of the engine, because they change what it computes.
ENGINE_SETTINGS = ("dtype", "quantization", "kv_cache_dtype", "lora", "chat_template")
TEXT = {"metavar": "TEXT"}
_VIDEO_PROMPTS = {prompt: prompt.replace("image", "video") for prompt in (DEFAULT_PROMPT, *PRESETS.values())}
MIN_FRAME_PIXELS = 128 * 28 * 28  # qwen-vl-utils enlarges smaller frames to this area
_AT_LEAST_ONE = (lambda number: isinstance(number, int) and number >= 1, "an integer of at least 1")
_REQUIRED_OF_VIDEOS = {
    "video_fps": (lambda fps: 0 < fps <= MAX_FPS, f"a number above 0 and at most {MAX_FPS}"),
    "video_frames": _AT_LEAST_ONE,
    "video_max_pixels": _AT_LEAST_ONE,
    "clip_seconds": (lambda seconds: 0 < seconds <= 1e6, "a number above 0 and at most 1000000"),
}


@dataclass(frozen=True, slots=True)
class VideoSampling:
    """How frames are sampled from videos, in fields with the names that `CaptionSettings` uses.

    Raises ArgumentError for invalid values.
    """

    video_fps: float | None
    video_frames: int | None
    video_max_pixels: int | None
    clip_seconds: float | None

    def __post_init__(self):
        if self.video_fps is not None and self.video_frames is not None:
            raise ArgumentError("give either {video_fps} or {video_frames}")
        for name, (is_valid, required) in _REQUIRED_OF_VIDEOS.items():
            value = getattr(self, name)
            if value is not None and not (is_number(value) and is_valid(value)):
                raise ArgumentError(f"{{{name}}} must be {required}, got {{value!r}}", value=value)

    def part(self, item: Item) -> dict[str, Any]:
        """Return the content part for a video or clip, with the keys of qwen-vl-utils."""
        keys = {"video_start": item.start, "video_end": item.end, "max_pixels": self.video_max_pixels}
        if self.video_frames is None:
            keys["fps"] = self.video_fps or DEFAULT_FPS
        else:
            keys["nframes"] = self.video_frames
        return {"type": "video", "video": item, **keys, **self.processor_kwargs}

    @property
    def processor_kwargs(self) -> dict[str, int]:
        """`min_pixels` of a frame if `video_max_pixels` is given, which may be below the checkpoint's minimum."""
        return {} if self.video_max_pixels is None else {"min_pixels": min(self.video_max_pixels, MIN_FRAME_PIXELS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionSettings:
    """Settings of one job that change captions; a run resumes an output only if the settings are equal.

    Resuming compares names, values and defaults of the fields with an existing output. A new field therefore needs a
    default that keeps the earlier behavior, and this default must never change. To rename or remove a field, raise
    `VERSION` in settings_file.py.

    Args:
        model: the model's name.
        dtype, quantization, kv_cache_dtype, lora, chat_template: see `EngineConfig`.
        system: system message.
        prompt: prompt of the captions; that of videos says "video" instead of "image" if it is a preset.
        prompts: several prompts, as texts or as dicts with `name` and `prompt`. One record has an image's captions for
            all of them, and `prompt` is the first of them.
        max_tokens: maximum length of a caption, -1 for none.
        temperature: sampling temperature; 0 is greedy.
        beam_width: beam search with this many beams, instead of greedy decoding; it does not detect repetitions.
        n: captions per prompt; more than one needs temperature or beam_width.
        seed: seed that makes sampled captions reproducible.
        stop_on_repetition: end captions that repeat themselves, with finish_reason repetition.
        min_pixels: enlarge smaller images to this area.
        max_pixels: shrink larger images to this area, which is faster.
        jpeg_draft: decode large JPEGs at a reduced scale, which is faster and changes pixel values.
        schema: JSON schema of the captions, as a dict, as text or as a pydantic model; records have the parsed
            `object`.
        allow_special_tokens: treat special tokens in prompts, system message and contexts as control tokens instead of
            text.
        chat_template_kwargs: arguments of the chat template.
        context_from: add the text of the file with this suffix beside each image, such as .txt with tags, to the
            prompt.
        context_mode: where the context goes: before or after the prompt.
        prefix: text before every caption.
        suffix: text after every caption.
        trigger_word: write 'WORD, ' between prefix and caption.
        video_fps: frames to sample per second, at least 4 in all; by default 2.
        video_frames: frames to sample of each clip, an even number; instead of video_fps.
        video_max_pixels: shrink larger frames to this area; by default 768 tokens for two frames, less for many frames.
        clip_seconds: caption longer videos as clips of this length, with a record each.
        animations_as_clips: treat GIF, WebP, AVIF, APNG and TIFF files with several frames as videos, not as images.
    """

    model: str = "bundled"
    dtype: str = "auto"
    system: str | None = field(default=None, metadata=TEXT)
    prompt: str = DEFAULT_PROMPT
    max_tokens: int = field(default=256, metadata={"least": None})
    temperature: float = 0.0
    seed: int | None = field(default=None, metadata={"least": None})
    min_pixels: int | None = None
    max_pixels: int | None = None
    prefix: str = field(default="", metadata=TEXT)
    suffix: str = field(default="", metadata=TEXT)
    trigger_word: str | None = field(default=None, metadata={"metavar": "WORD"})
    quantization: str | None = None
    allow_special_tokens: bool = False
    context_from: str | None = field(default=None, metadata={"metavar": "SUFFIX"})
    context_mode: str = field(default="prepend", metadata={"choices": MODES})
    chat_template_kwargs: dict[str, Any] | None = None
    video_fps: float | None = None
    video_frames: int | None = None
    video_max_pixels: int | None = None
    clip_seconds: float | None = None
    animations_as_clips: bool = False
    lora: str | None = None
    schema: str | None = None
    stop_on_repetition: bool = True
    beam_width: int | None = None
    prompts: list[dict[str, str]] | None = None
    n: int = 1
    jpeg_draft: bool = False
    kv_cache_dtype: str = "auto"
    chat_template: str | None = None

    def __post_init__(self):
        self._set_prompts()
        texts = {name: getattr(self, name) for name in ("prefix", "suffix", "trigger_word")}
        object.__setattr__(self, "schema", schema_text(self.schema, **texts))
        object.__setattr__(self, "chat_template_kwargs", check_template_kwargs(self.chat_template_kwargs) or None)
        if self.schema is not None and self.beam_width is not None:
            raise ArgumentError("{beam_width} cannot be used with a {schema}, which some presets have, too")
        _ = self.sampling_params  # checks the values
        self._check_n()
        if not self.prompt.strip():
            raise ValueError("the prompt is empty; give a question or an instruction")
        check_context(self.context_from, self.context_mode)
        pixel_bounds(self.min_pixels, self.max_pixels, 1, MAX_SOURCE_PIXELS)
        _ = self.video_sampling  # checks the values, too

    def _set_prompts(self) -> None:
        """Give every prompt a name; a list with a single prompt becomes `prompt`."""
        if self.prompts is None:
            return
        prompts = named_prompts(self.prompts)
        if self.prompt not in (DEFAULT_PROMPT, prompts[0]["prompt"]):
            raise ArgumentError("give either {prompt} or {prompts}")
        object.__setattr__(self, "prompt", prompts[0]["prompt"])
        object.__setattr__(self, "prompts", prompts if len(prompts) > 1 else None)

    def _check_n(self) -> None:
        if self.n * self.num_prompts > MAX_COMPLETIONS:
            number = self.n * self.num_prompts
            raise ArgumentError(f"{{n}} and {{prompts}} make {number} captions per image, more than {MAX_COMPLETIONS}")
        if self.n > 1 and self.temperature == 0 and self.beam_width is None:
            raise ArgumentError(
                "{n} is {value}, but greedy captions would all be equal: give a {temperature}", value=self.n
            )

    def __hash__(self) -> int:
        return hash((self.model, self.prompt))  # other fields may be dicts, which cannot be hashed

    @property
    def sampling_params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            n=self.n,
            seed=self.seed,
            beam_width=self.beam_width,
            stop_on_repetition=self.stop_on_repetition and self.beam_width is None,
            # Line breaks and indentation would cost tokens, and the parsed object does not keep them.
            structured=None if self.schema is None else {"json": self.schema, "whitespace_pattern": " ?"},
        )

    @property
    def video_sampling(self) -> VideoSampling:
        """How frames are sampled from videos."""
        return VideoSampling(self.video_fps, self.video_frames, self.video_max_pixels, self.clip_seconds)

    @property
    def fingerprint(self) -> str:
        """A hash of the settings (16 hex digits) that is the same in every run."""
        return _fingerprint(self)

    @property
    def is_repeatable(self) -> bool:
        """Whether equal images get equal captions, because decoding is greedy or seeded."""
        return self.temperature == 0 or self.seed is not None

    def difference(self, other: dict[str, Any]) -> list[str]:
        """Describe the fields that differ from `other`, settings of an earlier run, in which fields may be missing."""
        mine, theirs = dataclasses.asdict(self), _DEFAULTS | other
        changed = [
            f"{name} was {theirs[name]!r:.200}, is {value!r:.200}"
            for name, value in mine.items()
            if value != theirs[name]
        ]
        unknown = [name for name, value in other.items() if name not in mine and value]
        return changed + [
            f"this version of mmvllm has no setting {name} (was {other[name]!r:.200})" for name in unknown
        ]

    @property
    def video_prompt(self) -> str:
        """The job's prompt for videos; presets and the default prompt then say "video" instead of "image"."""
        return _VIDEO_PROMPTS.get(self.prompt, self.prompt)

    @property
    def makes_several(self) -> bool:
        """Whether a record has a list of captions."""
        return self.prompts is not None or self.n > 1

    @property
    def num_prompts(self) -> int:
        """The number of the job's prompts."""
        return len(self.prompt_names)

    @property
    def prompt_names(self) -> list[str | None]:
        """The names of the job's prompts; a single prompt has the name None."""
        return [None] if self.prompts is None else [one["name"] for one in self.prompts]

    def prompt_for(self, item: Item) -> str:
        """Return the item's prompt or else the job's first prompt, with the item's context if it has one."""
        return self._prompt(item, item.beside if item.context is None else item.context)

    def prompts_for(self, item: Item) -> list[NamedPrompt]:
        """Return the item's prompt alone, if it differs from the job's first prompt, or else all prompts of the job."""
        first = NamedPrompt(self.prompt_names[0], self.prompt_for(item))
        if self.prompts is None or item.prompt not in (None, "", self._own_prompt(item)):
            return [NamedPrompt(None, first.text) if item.prompt else first]
        context = item.beside if item.context is None else item.context
        texts = [
            _VIDEO_PROMPTS.get(one["prompt"], one["prompt"]) if item.is_video else one["prompt"] for one in self.prompts
        ]
        return [
            NamedPrompt(name, self._with(text, context)) for name, text in zip(self.prompt_names, texts, strict=True)
        ]

    def _own_prompt(self, item: Item) -> str:
        return self.video_prompt if item.is_video else self.prompt

    def _prompt(self, item: Item, context: str | None) -> str:
        return self._with(item.prompt or self._own_prompt(item), context)

    def _with(self, prompt: str, context: str | None) -> str:
        parts = [f"Context: {context}", prompt] if context else [prompt]
        return "\n\n".join(parts if self.context_mode == "prepend" else reversed(parts))

    def key(self, item: Item) -> str:
        """Return the key of a task (32 hex digits): a hash of the settings, real path, id, prompt, data URI and clip.

        The text beside the image is not part of the key: like the image itself, it may change without creating a new
        task.
        """
        data = item.source if isinstance(item.source, str) and item.source[:5].lower() == "data:" else None
        facts = (self.fingerprint, item.real_path, item.id, self._prompt(item, item.context), data, item.part)
        return _digest("\0".join(fact or "" for fact in facts))

    def content_key(self, digest: str, prompt: str) -> str:
        """Return a hash (32 hex digits) that images or clips with this digest, prompt and settings share."""
        return digest_of(*(text.encode("utf-8", "surrogatepass") for text in (self.fingerprint, digest, prompt))).hex()

    def request(self, item: Item) -> dict:
        """Return the chat request, which contains the item itself in place of the image or video.

        If there are several prompts, `more` has the messages for the second and later ones.
        """
        media = [self.video_sampling.part(item) if item.is_video else {"type": "image", "image": item}]
        messages, *more = [self._messages(media, prompt.text) for prompt in self.prompts_for(item)]
        names = ("allow_special_tokens", "chat_template_kwargs", "min_pixels", "max_pixels")
        own = {"jpeg_draft": True} if self.jpeg_draft else {}
        kwargs = self.video_sampling.processor_kwargs if item.is_video else own
        request = {"messages": messages, "mm_processor_kwargs": kwargs, **{name: getattr(self, name) for name in names}}
        return request | ({"more": more} if more else {})

    @property
    def messages_without_media(self) -> list[dict]:
        """The messages of a request without image, video or context."""
        return self._messages([], self.prompt)

    def _messages(self, media: list[dict], prompt: str) -> list[dict]:
        """Put the image before the prompt, so that all prompts share the KV of the system message and the image."""
        messages = [{"role": "user", "content": [*media, {"type": "text", "text": prompt}]}]
        return messages if self.system is None else [{"role": "system", "content": self.system}, *messages]

    def caption(self, text: str) -> str:
        """Return the caption to record for the model's text."""
        trigger = f"{self.trigger_word}, " if self.trigger_word else ""
        return f"{self.prefix}{trigger}{text.strip()}{self.suffix}"


_DEFAULTS = {one.name: one.default for one in dataclasses.fields(CaptionSettings)}


@cache  # called for every image that is found
def _fingerprint(settings: CaptionSettings) -> str:
    changed = {name: value for name, value in dataclasses.asdict(settings).items() if value != _DEFAULTS[name]}
    equal = json.loads(json.dumps(changed), parse_float=_number)  # equal numbers have equal fingerprints
    return _digest(json.dumps(equal, sort_keys=True))[:16]


def _number(text: str) -> int | float:
    return int(value) if (value := float(text)).is_integer() else value


def _digest(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))  # file names need not be Unicode
