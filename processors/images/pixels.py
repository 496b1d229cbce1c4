"""Convert a decoded image of any mode to upright 8-bit RGB, with few copies of its pixels in memory at once."""

import numpy as np
from PIL import ExifTags, Image
from PIL.Image import Transpose

from mmvllm.processors.images.scan import RefusedImage, scan_exif

# EXIF orientation -> the transposition that undoes it. `ImageOps.exif_transpose` would also rewrite the EXIF block,
# which fails if that block is damaged although the image is not.
_UPRIGHT = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}


MAX_EXIF_TEXT = 1_000_000  # characters; a block has at most 64 KiB, and splitting lines takes thirty times their size
_KEY = "mmvllm.orientation"  # in `Image.info` of images that `upright_rgb` has turned


def orientation_of(image: Image.Image) -> int:
    """Return the EXIF orientation, from 1 to 8, that `upright_rgb` has undone; 1 for any other image."""
    return image.info.get(_KEY, 1)


def with_orientation(image: Image.Image, orientation: int) -> Image.Image:
    """Return the image, marked as turned from this EXIF orientation."""
    image.info[_KEY] = orientation
    return image


def upright_rgb(image: Image.Image, is_own: bool = False) -> Image.Image:
    """Convert a loaded image to a new upright 8-bit RGB image; raises RefusedImage for a hostile EXIF block.

    Args:
        is_own: whether nobody else uses the image, so the new image may take over its pixels.
    """
    orientation = _orientation(image)
    method = _UPRIGHT.get(orientation)
    turned = image if method is None else image.transpose(method)
    if turned.mode != "RGB" or turned.has_transparency_data:
        turned = _to_rgb(turned)
    elif turned is image:
        turned = image._new(image.im) if is_own else image.copy()  # what `copy` does, without copying the pixels
    turned.info = {}  # drop the file's profiles and texts: they may be megabytes, and would be saved with the image
    return with_orientation(turned, 1 if method is None else orientation)


def _orientation(image: Image.Image) -> int | None:
    """Return the EXIF orientation; None if there is none, or if Pillow cannot read the damaged block."""
    try:
        block = image.info.get("exif")
        if block is None and isinstance(text := image.info.get("Raw profile type exif"), str):  # hexadecimal, in a PNG
            if len(text) > MAX_EXIF_TEXT:
                return None
            block = bytes.fromhex("".join(text.split("\n")[3:]))
        if isinstance(block, bytes):
            scan_exif(block)
        return image.getexif().get(ExifTags.Base.Orientation)
    except RefusedImage:
        raise
    except Exception:  # Pillow raises any exception for a damaged block; the image may be intact
        return None


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert to a new 8-bit RGB image; transparency is blended with white."""
    if image.mode == "F" or image.mode.startswith("I"):
        return Image.fromarray(_to_8_bits(image)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    rgba = image if image.mode == "RGBA" else image.convert("RGBA")
    white = Image.new("RGB", rgba.size, (255, 255, 255))
    white.paste(rgba, mask=rgba)
    return white


def _to_8_bits(image: Image.Image) -> np.ndarray:
    """Scale gray levels to uint8; Pillow's conversion would clip them.

    32-bit and float images do not define their white level. It is assumed to be 1 (floats only) or 255 if no level
    exceeds it, and 65535 otherwise.
    """
    if image.mode.startswith("I;16"):
        return (np.asarray(image) >> 8).astype(np.uint8)
    levels = np.array(image, dtype=np.float32)
    top = levels.max(where=np.isfinite(levels), initial=0)
    np.clip(np.nan_to_num(levels, copy=False), 0, top, out=levels)
    if top > 255:
        np.floor_divide(levels, 256, out=levels)
    elif image.mode == "F" and top <= 1:
        levels *= 255
    return np.clip(np.rint(levels, out=levels), 0, 255, out=levels).astype(np.uint8)
