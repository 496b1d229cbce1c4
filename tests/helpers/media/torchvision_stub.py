"""What transformers and qwen-vl-utils use of torchvision to prepare frames, as modules of that name.

torchvision's own functions for tensors are these calls of torch; the package itself has to be built for the torch that
is installed. Only for a separate process: `tests.helpers.media.video_references` starts one.
"""

import logging
import sys
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor


class InterpolationMode(Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def resize(video: Tensor, size: list[int], interpolation: InterpolationMode, antialias: bool) -> Tensor:
    """`torchvision.transforms.functional.resize`: in float32, rounded for tensors of uint8."""
    assert interpolation is InterpolationMode.BICUBIC and video.dtype is torch.uint8
    if list(video.shape[-2:]) == list(size):
        return video
    resized = F.interpolate(video.float(), size=size, mode="bicubic", align_corners=False, antialias=antialias)
    return resized.clamp(min=0, max=255).round().to(torch.uint8)


def resize_v2(video: Tensor, size: list[int], interpolation: InterpolationMode, antialias: bool) -> Tensor:
    """`torchvision.transforms.v2.functional.resize`: tensors of uint8 are resized as they are, which rounds twice."""
    assert interpolation is InterpolationMode.BICUBIC
    if list(video.shape[-2:]) == list(size):
        return video
    shape = video.shape
    flat = video.reshape(-1, *shape[-3:])
    resized = F.interpolate(flat, size=size, mode="bicubic", align_corners=False, antialias=antialias)
    return resized.reshape(*shape[:-2], *resized.shape[-2:])


def normalize(video: Tensor, mean: Tensor, std: Tensor, inplace: bool) -> Tensor:
    return video.sub(mean[:, None, None]).div_(std[:, None, None])


def install() -> None:
    """Register the modules in this process, which must not have imported transformers before."""
    assert "transformers" not in sys.modules
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    names = ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional")
    modules = {name: ModuleType(f"torchvision{name}") for name in names}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(module.__name__, None, is_package=True)
        sys.modules[module.__name__] = module
        parent, _, own = name.rpartition(".")
        if own:
            setattr(modules[parent], own, module)
    modules[""].__version__ = "0.28.0"
    modules[""].__file__ = __file__
    modules[".io"].ImageReadMode = modules[".io"].decode_image = None
    modules[".transforms"].InterpolationMode = InterpolationMode
    modules[".transforms.functional"].resize = resize
    modules[".transforms.functional"].pil_to_tensor = None
    v2 = modules[".transforms.v2.functional"]
    v2.InterpolationMode, v2.resize, v2.normalize, v2.grayscale_to_rgb = InterpolationMode, resize_v2, normalize, _as_is


def _as_is(video: Tensor) -> Tensor:
    assert video.shape[-3] == 3
    return video
