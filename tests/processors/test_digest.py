"""A digest is that of content in caches and records: nobody can make other content that has it."""

import struct

import numpy as np
import pytest
import xxhash
from PIL import Image

from mmvllm.captioning.jobs.preparation import image_info
from mmvllm.inputs import MediaRules
from mmvllm.processors.digest import NUM_BYTES, digest_of
from mmvllm.processors.tensors import media_from_tensors
from tests.helpers.engine.requests import noise_image

# The secret of XXH3, from its specification.
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
RULES = MediaRules(9, None, 7, 8, "<start>", "<image>", "<video>", "<end>", merge_size=2, patch_dim=96)
WORD, HALF = 2**64 - 1, 2**32 - 1


def forged(target: bytes, content: bytes, prefix: bytes = b"") -> bytes:
    """Bytes that XXH3 cannot tell from `target` after the prefix; 10 of 16 stripes have the bytes of `content`."""
    wanted, made = prefix + target, bytearray(prefix + content)
    num_blocks = (len(wanted) - 64) // 1024
    made[num_blocks * 1024 :] = wanted[num_blocks * 1024 :]

    def key(stripe: int, lane: int) -> int:
        return struct.unpack_from("<Q", SECRET, 8 * stripe + 8 * lane)[0]

    def product(value: int, stripe: int, lane: int) -> int:
        mixed = value ^ key(stripe, lane)
        return (mixed & HALF) * (mixed >> 32)

    for block in range(num_blocks):
        for lane in range(8):
            at = [block * 1024 + stripe * 64 + lane * 8 for stripe in range(16)]
            old = [struct.unpack_from("<Q", wanted, place)[0] for place in at]
            new = [struct.unpack_from("<Q", made, place)[0] for place in at[:10]]
            total = sum(old) - sum(new)
            mixed = sum(product(value, i, lane) for i, value in enumerate(old))
            mixed = (mixed - sum(product(value, i, lane) for i, value in enumerate(new))) & WORD
            low, high = mixed & (2**31 - 1), mixed >> 31
            top = 2**31 if high >> 32 else 0
            keys = [low << 32 | 1, 2**63 | high & HALF, 2**63 | top, 2**63 | top]
            new += [value ^ key(10 + i, lane) for i, value in enumerate(keys)]
            total = (total - sum(new[10:])) & WORD
            first, last = key(14, lane), key(15, lane)
            rest = (total - first) & HALF
            carry = ((first & HALF) + rest) >> 32
            new.append(((total >> 32) - (last >> 32) - carry & HALF) << 32 | first & HALF)
            new.append(last >> 32 << 32 | rest)
            for place, value in zip(at, new, strict=True):
                struct.pack_into("<Q", made, place, value)
    return bytes(made[len(prefix) :])


def same_in_xxh3(prefix: bytes) -> tuple[Image.Image, Image.Image]:
    image, other = noise_image(56, 56), Image.new("RGB", (56, 56), "red")
    made = forged(image.tobytes(), other.tobytes(), prefix)
    assert made != image.tobytes()
    assert xxhash.xxh3_128_digest(prefix + made) == xxhash.xxh3_128_digest(prefix + image.tobytes())
    return image, Image.frombytes("RGB", image.size, made)


def test_records_tell_forged_images_apart():
    image, other = same_in_xxh3(b"(56, 56)")
    assert image_info(image)["digest"] != image_info(other)["digest"]


def test_caches_tell_forged_patches_apart():
    patches = np.random.default_rng(0).integers(0, 256, (64, 96), np.uint8)
    made = np.frombuffer(forged(patches.tobytes(), bytes(patches.nbytes)), np.uint8).reshape(patches.shape)
    assert xxhash.xxh3_128_digest(patches.tobytes()) == xxhash.xxh3_128_digest(made.tobytes())
    digests = {media_from_tensors("image", RULES, one, [(1, 8, 8)])[0].digests for one in (patches, made.copy())}
    assert len(digests) == 2


@pytest.mark.parametrize("parts", [(b"a", b"bc"), (b"abc",), (b"abc", b""), (b"", b"abc"), (b"ab", memoryview(b"d"))])
def test_parts_matter(parts):
    assert digest_of(b"ab", b"c") != digest_of(*parts) and len(digest_of(*parts)) == NUM_BYTES
    assert digest_of(*map(bytes, parts)) == digest_of(*parts)
