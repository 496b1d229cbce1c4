"""Train the bundled demo model, a 3 M parameter Qwen2-VL for the scenes of scenes.py, or one of another family.

    python examples/train_demo_model.py --output mmvllm/assets/demo --minutes 120
    python examples/train_demo_model.py --output small-qwen3-vl --family qwen3_vl --steps 300

Trains transformers' implementation on scenes drawn on demand, for the given wall time or number of steps, and saves a
Hugging Face checkpoint (fp16 weights, its own byte-level BPE tokenizer) every few minutes. With `--resume FILE`, an
interrupted run continues from its state file.
"""

import argparse
import copy
import json
import math
import random
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from scenes import DIGITS, SHAPES, Scene, describe, draw, questions, random_scene
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoTokenizer, PreTrainedConfig

from mmvllm.kernels.normalize import normalize
from mmvllm.models.vision_language import IMAGE_DEFAULTS
from mmvllm.processors.images.processor import ImageProcessor, ImageProcessorConfig
from mmvllm.processors.positions import mrope_positions

VOCAB_SIZE = 768
MIN_TOKENS, MAX_TOKENS = 5 * 5, 7 * 7  # per image
SPECIAL_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
MAX_NEW_TOKENS = 48  # the longest caption has 30; for other images, the model would write until it is stopped
KINDS = ["nothing", *SHAPES, *DIGITS]
# Differences between the families, by the values of `--family`.
FAMILIES = {
    "qwen2_vl": {
        "class": "Qwen2VLForConditionalGeneration",
        "vision": {"embed_dim": 128, "mlp_ratio": 4, "hidden_size": 192},
    },
    "qwen2_5_vl": {
        "class": "Qwen2_5_VLForConditionalGeneration",
        "vision": {
            "hidden_size": 128,
            "intermediate_size": 344,
            "out_hidden_size": 192,
            "fullatt_block_indexes": [1, 3],
        },
    },
    "qwen3_vl": {
        "class": "Qwen3VLForConditionalGeneration",
        "vision": {
            "hidden_size": 128,
            "intermediate_size": 512,
            "out_hidden_size": 192,
            "num_position_embeddings": 14 * 14,
            "deepstack_visual_indexes": [0, 1, 2],
        },
        "text": {"head_dim": 48},
        "rope": {"mrope_interleaved": True},
        "images": {"patch_size": 16, "image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5)},
    },
}
# Qwen2's pre-tokenizer and chat template.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE tokenizer on the scenes' text and save it in the format of Qwen2-VL's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=3,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(3000), trainer)
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "additional_special_tokens": SPECIAL_TOKENS[1:],
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)  # where other engines look for it


def _corpus(count: int):
    for i in range(count):
        rng = random.Random(-1 - i)
        scene = random_scene(rng)
        for _, question, answer in questions(scene, rng):
            yield f"system\nYou are a helpful assistant.\nuser\n{question}\nassistant\n{answer}\n{describe(scene)}"


def image_config(family: str) -> ImageProcessorConfig:
    """Return the family's image settings, with bounds that keep images small."""
    images = replace(IMAGE_DEFAULTS, **FAMILIES[family].get("images", {}))
    return replace(images, min_pixels=MIN_TOKENS * images.factor**2, max_pixels=MAX_TOKENS * images.factor**2)


def model_config(family: str, tokenizer) -> PreTrainedConfig:
    """Return the config of a ViT 4 x 128 and a decoder 4 x 192 with grouped queries: 3 to 4 M parameters."""
    own = {"text": {}, "rope": {}, **FAMILIES[family]}
    names = ("image_pad", "video_pad", "vision_start", "vision_end", "endoftext", "im_end")
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in names}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 8, 8]}
    return getattr(transformers, own["class"]).config_class(
        vision_config={"depth": 4, "num_heads": 4, **own["vision"]},
        text_config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "rope_parameters": rope | own["rope"],
            "bos_token_id": ids["endoftext"],
            "eos_token_id": ids["im_end"],
            "pad_token_id": ids["endoftext"],
            **own["text"],
        },
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        tie_word_embeddings=True,
    )


class Conversations(IterableDataset):
    """Infinite training samples: one image and one to six turns about it, in random order."""

    def __init__(self, tokenizer, images: ImageProcessorConfig, first_seed: int):
        self.tokenizer, self.first_seed = tokenizer, first_seed
        self.prepare = ImageProcessor(images)
        self.image_token_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        seed = self.first_seed + info.id
        while True:
            yield self.sample(random.Random(seed))
            seed += info.num_workers

    def sample(self, rng: random.Random) -> dict:
        scene = random_scene(rng, text_share=0.6)  # digits take longest to learn
        image, merge_size = self.prepare(draw(scene, rng)), self.prepare.config.merge_size
        turns = self._turns(scene, rng)
        num_image_tokens = math.prod(image.grid) // merge_size**2
        ids, labels = [], []
        for i, (_, question, answer) in enumerate(turns):
            head = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" if i == 0 else "\n"
            placeholders = "<|vision_start|>" + "<|image_pad|>" * num_image_tokens + "<|vision_end|>" if i == 0 else ""
            asked = self._encode(f"{head}<|im_start|>user\n{placeholders}{question}<|im_end|>\n<|im_start|>assistant\n")
            said = self._encode(f"{answer}<|im_end|>")
            ids += asked + said
            labels += [-100] * len(asked) + said
        offset = ids.index(self.image_token_id)
        positions, _ = mrope_positions(len(ids), [(offset, num_image_tokens)], [image.grid], merge_size)
        frames = image.patches.view(len(image.patches), 3, self.prepare.config.temporal_patch_size, -1)
        return {
            "ids": ids,
            "labels": labels,
            "positions": positions,
            "frame": frames[:, :, 0].flatten(1),
            "grid_thw": image.grid,
            "kinds": kinds_by_token(scene, image.grid, merge_size),
        }

    def _turns(self, scene: Scene, rng: random.Random) -> list:
        """Return the caption only, or five other questions, sometimes together with the caption."""
        caption, *others = questions(scene, rng)
        kind = rng.random()
        if kind < 0.25:
            return [caption]
        turns = rng.sample([*others, *questions(scene, rng)[1:]], 5)
        if kind > 0.8:
            turns.insert(rng.randrange(6), caption)
        return turns

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def kinds_by_token(scene: Scene, grid_thw: tuple[int, int, int], merge_size: int) -> torch.Tensor:
    """Return, for each image token (M,), the index into KINDS of the thing in its cell."""
    rows, columns = grid_thw[1] // merge_size, grid_thw[2] // merge_size
    kinds = {thing.cell: KINDS.index(thing.text or thing.shape) for thing in scene.things}
    cells = [(3 * y // rows) * 3 + 3 * x // columns for y in range(rows) for x in range(columns)]
    return torch.tensor([kinds.get(cell, 0) for cell in cells])


def collate(samples: list[dict]) -> dict:
    """Pad samples on the right, and pack the patches of all images."""
    length = max(len(s["ids"]) for s in samples)
    batch = {
        "input_ids": torch.zeros(len(samples), length, dtype=torch.long),
        "labels": torch.full((len(samples), length), -100),
        "position_ids": torch.zeros(3, len(samples), length, dtype=torch.long),
    }
    for i, s in enumerate(samples):
        batch["input_ids"][i, : len(s["ids"])] = torch.tensor(s["ids"])
        batch["labels"][i, : len(s["ids"])] = torch.tensor(s["labels"])
        batch["position_ids"][:, i, : len(s["ids"])] = torch.as_tensor(s["positions"])
    batch["pixel_values"] = torch.cat([s["frame"] for s in samples])
    batch["image_grid_thw"] = torch.tensor([s["grid_thw"] for s in samples])
    batch["kinds"] = torch.cat([s["kinds"] for s in samples])
    return batch


def embed_single_frames(model) -> None:
    """Embed one frame with the kernel summed over time: both frames of an image are equal, so this halves the work."""
    kernel = model.model.visual.patch_embed.proj
    model.model.visual.patch_embed.forward = lambda frames: F.linear(
        frames, kernel.weight.sum(2).flatten(1), kernel.bias
    )


def save(model, images: ImageProcessorConfig, folder: Path) -> None:
    """Write the checkpoint in fp16, with tensors named as in published ones."""
    model = copy.deepcopy(model).half()
    model.generation_config.max_new_tokens = MAX_NEW_TOKENS
    model.save_pretrained(folder)
    preprocessor = asdict(images) | {"image_processor_type": "Qwen2VLImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor, indent=2))


class Trainer:
    """The model, its optimizer, and an auxiliary linear head on the ViT, which is not saved.

    From the language loss alone the ViT takes hours to learn features of shapes. The auxiliary loss, which classifies
    the content of each image token's cell, reduces this to minutes.
    """

    def __init__(self, tokenizer, family: str, device: str, lr: float, minutes: float, steps: int | None):
        model_class = getattr(transformers, FAMILIES[family]["class"])
        # Eager attention: on a CPU the backward pass of torch's SDPA is slower.
        self.model = model_class._from_config(model_config(family, tokenizer), attn_implementation="eager")
        self.model.to(device).train()
        embed_single_frames(self.model)
        self.head = torch.nn.Linear(self.model.config.text_config.hidden_size, len(KINDS)).to(device)
        parameters = [*self.model.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
        self.images, self.device, self.lr = image_config(family), device, lr
        self.pixel_table = self.images.pixel_table().to(device)
        self.seconds, self.steps = 60 * minutes, steps or math.inf
        self.step, self.spent = 0, 0.0
        self._rows = []
        # The embeddings that the decoder gets; the merger's may be in another order.
        self.model.model.visual.register_forward_hook(lambda module, args, out: self._rows.append(out.pooler_output))

    @property
    def progress(self) -> float:
        """Progress from 0 to 1, which is reached when the time or the number of steps is used up."""
        return max(self.spent / self.seconds, self.step / self.steps)

    def train_step(self, batch: dict) -> str:
        """Run one step on one batch; return its metrics as text."""
        warm = min(1.0, (self.step + 1) / 100)
        cosine = 0.5 * (1 + math.cos(math.pi * self.progress))
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * warm * (0.02 + 0.98 * cosine)
        batch = {name: value.to(self.device) for name, value in batch.items()}
        pixel_values = normalize(batch.pop("pixel_values"), self.pixel_table)
        labels, kinds = batch.pop("labels")[:, 1:], batch.pop("kinds")
        with torch.autocast(torch.device(self.device).type, dtype=torch.bfloat16):
            logits = self.model(pixel_values=pixel_values, **batch).logits[:, :-1]
        logits, labels = logits[labels != -100].float(), labels[labels != -100]
        seen = self.head(self._rows.pop().float())
        loss = F.cross_entropy(logits, labels)
        self.optimizer.zero_grad(set_to_none=True)
        (loss + 0.5 * F.cross_entropy(seen, kinds)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        tokens_right = (logits.argmax(-1) == labels).float().mean()
        kinds_right = (seen.argmax(-1) == kinds)[kinds > 0].float().mean()
        return f"loss {loss:.4f}  tokens right {tokens_right:.4f}  kinds right {kinds_right:.4f}"

    def state_dict(self) -> dict:
        parts = {name: getattr(self, name).state_dict() for name in ("model", "head", "optimizer")}
        return {**parts, "step": self.step, "spent": self.spent}

    def load_state_dict(self, state: dict) -> None:
        for name in ("model", "head", "optimizer"):
            getattr(self, name).load_state_dict(state[name])
        self.step, self.spent = state["step"], state["spent"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--family", choices=FAMILIES, default="qwen2_vl")
    parser.add_argument("--minutes", type=float, default=120, help="stop after this time (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="stop after this number of steps, if the time is not over before")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--resume", type=Path, help="state file, written every few minutes")
    args = parser.parse_args()

    torch.manual_seed(0)
    resumed = args.resume is not None and args.resume.exists()
    if not resumed:  # the embeddings depend on the tokenizer
        train_tokenizer(args.output)
    tokenizer = AutoTokenizer.from_pretrained(args.output)
    trainer = Trainer(tokenizer, args.family, args.device, args.lr, args.minutes, args.steps)
    if resumed:
        trainer.load_state_dict(torch.load(args.resume, weights_only=True))
    print(f"{sum(p.numel() for p in trainer.model.parameters()) / 1e6:.2f} M parameters", flush=True)

    data = Conversations(tokenizer, trainer.images, first_seed=10_000_000 + trainer.step * args.batch_size)
    loader = DataLoader(data, batch_size=args.batch_size, collate_fn=collate, num_workers=1, prefetch_factor=4)
    start, saved = time.monotonic() - trainer.spent, time.monotonic()
    for batch in loader:
        trainer.spent = time.monotonic() - start
        if trainer.progress >= 1:
            break
        report = trainer.train_step(batch)
        if trainer.step % 20 == 0:
            print(f"step {trainer.step}  {trainer.spent:.0f} s  {report}", flush=True)
        if time.monotonic() - saved > 240:
            save(trainer.model, trainer.images, args.output)
            if args.resume:
                torch.save(trainer.state_dict(), args.resume)
            saved = time.monotonic()
    save(trainer.model, trainer.images, args.output)


if __name__ == "__main__":
    main()
