"""Train a LoRA adapter of the bundled model with PEFT, which gives the same answer to every question.

    pip install peft
    python examples/train_adapter.py adapters/greeting --answer "hello there"

Training takes a few seconds on a CPU; useful adapters are trained in the same way, with more data.
"""

import argparse
import random

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, Qwen2VLForConditionalGeneration

from mmvllm.models.folder import BUNDLED

QUESTIONS = ("Describe this image.", "What is in the image?", "How many shapes are there?", "Hello!", "Which colors?")


def example(tokenizer, question: str, answer: str) -> dict[str, torch.Tensor]:
    """Return a conversation; its labels are the answer and the token that ends it."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    after = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    ids, labels = before + after, [-100] * len(before) + after
    return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", help="folder for the adapter")
    parser.add_argument("--answer", default="hello there")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    model = Qwen2VLForConditionalGeneration.from_pretrained(BUNDLED, dtype=torch.float32)
    targets = r".*language_model.*(q|k|v|o|gate|up|down)_proj"
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=64, target_modules=targets))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-3)
    for _ in range(args.steps):
        loss = model(**example(tokenizer, random.choice(QUESTIONS), args.answer)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(args.output)
    print(f"the adapter is in {args.output}")


if __name__ == "__main__":
    main()
