"""Requests whose completions are compared with transformers'."""

from mmvllm import SamplingParams
from tests.helpers.engine.requests import ask, frames, noise_image

GREEDY = SamplingParams(max_tokens=32, ignore_eos=True)
A, B, C = noise_image(91, 64, 1), noise_image(60, 133, 2), noise_image(200, 77, 3)
REQUESTS = {
    "text": ask("Count the shapes."),
    "one": ask(A, "Describe this image."),
    "text first": ask("What is at the top? ", B),
    "two": ask(A, B, "Which is larger?"),
    "two apart": ask("First: ", B, " then: ", C, " what changed?"),
    "three": ask(C, A, "and", B, "?"),
    "same twice": ask(A, A, "equal?"),
    "turns": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": [{"type": "image", "image": A}, {"type": "text", "text": "What?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "A red star."}]},
            {"role": "user", "content": [{"type": "text", "text": "And here? "}, {"type": "image", "image": B}]},
        ]
    },
}
# Merged grids of 4x4, 2x4 and 3x6: windows of 1, 2, 3 and 4 merged patches divide some exactly.
EXACT = ask(noise_image(112, 112, 4), noise_image(112, 56, 5), noise_image(168, 84, 6))
# Frames of odd sizes; temporal patches of one number of seconds, of a fraction of it, and more of them than rows.
SHORT, ODD, LONG = frames(4, 60, 133, 7), frames(5, 91, 64, 8), frames(32, 70, 70, 9)
VIDEOS = {
    "one clip": ask(SHORT, "Describe this video."),
    "an odd number of frames": ask("What moves? ", ODD, mm_processor_kwargs={"fps": 3}),
    "32 frames": ask(LONG, "Describe this video."),
    "two clips": ask("First: ", ODD, " then: ", SHORT, " what changed?"),
    "the same clip twice": ask(ODD, ODD, "equal?", mm_processor_kwargs={"fps": 1}),
    "clips and images": ask(A, ODD, B, "and", SHORT, "?", mm_processor_kwargs={"fps": 12.5}),
    "turns": {
        "messages": [
            {"role": "user", "content": [{"type": "video", "video": SHORT}, {"type": "text", "text": "What?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "A white bar."}]},
            {"role": "user", "content": [{"type": "image", "image": A}, {"type": "video", "video": ODD}]},
        ]
    },
}
