"""Runs the same requests in OpenVINO GenAI, in a process that may use another environment's interpreter.

Both processes stay alive, and only one of them computes at a time. OpenVINO models are converted by `optimum-cli`;
their speed does not depend on the values of their weights.
"""

import base64
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from mmvllm.bench import openvino_worker
from mmvllm.bench.runs import Run
from mmvllm.config import ModelConfig
from mmvllm.models.registry import load_config
from mmvllm.outputs import CompletionOutput, RequestOutput

PACKAGES = "pip install openvino-genai openvino-tokenizers pillow"
COMPARED = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")


class OpenVino:
    """A converted model in a separate process, with the same `run` as `Mmvllm`; the stack ends the process."""

    def __init__(
        self, folder: Path, python: str | None, config: ModelConfig, tokenizer, batch_size: int, stack: ExitStack
    ):
        """Load the model; raise ValueError if its sizes differ from `config`, or if OpenVINO cannot be imported."""
        _check_sizes(folder, config)
        self.tokenizer, self.python = tokenizer, python or sys.executable
        command = [self.python, openvino_worker.__file__]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = stack.enter_context(subprocess.Popen(command, text=True, encoding="utf-8", **pipes))
        stack.callback(self.process.kill)
        settings = {"model": str(folder), "max_num_seqs": batch_size, "threads": torch.get_num_threads()}
        self.version = self._ask(settings)["version"]

    def run(self, requests: list[dict], output_tokens: int) -> Run:
        """Run the requests like `Mmvllm.run`; all requests arrive at the start."""
        asked = [_asked(request) for request in requests]
        made = self._ask({"requests": asked, "output_tokens": output_tokens})
        start, answers = made["start"], zip(requests, made["answers"], strict=True)
        outputs = [self._output(request, answer, start) for request, answer in answers]
        return Run(start, 0.0, made["seconds"], outputs, made["peak_memory"], decode_seconds=made["decode_seconds"])

    def _ask(self, line: dict) -> dict[str, Any]:
        try:
            print(json.dumps(line), file=self.process.stdin, flush=True)
            reply = self.process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        if not reply:
            raise ValueError(f"OpenVINO's process, {self.python}, ended with code {self.process.wait()}")
        made = json.loads(reply)
        if "missing" in made:
            raise ValueError(
                f"--compare openvino cannot import OpenVINO GenAI in {self.python} ({made['missing']}); {PACKAGES}, "
                "or give the interpreter of an environment that has it with --openvino-python"
            )
        if "error" in made:
            raise ValueError(f"OpenVINO GenAI: {made['error']}")
        return made

    def _output(self, request: dict, answer: dict, start: float) -> RequestOutput:
        return RequestOutput(
            "",
            [CompletionOutput("", answer["token_ids"], "length")],
            answer["num_prompt_tokens"],
            num_image_tokens=self._image_tokens(request, answer["num_prompt_tokens"]),
            arrival_time=start,
            first_token_time=answer["first_token_time"],
            finish_time=answer["finish_time"],
        )

    def _image_tokens(self, request: dict, num_prompt_tokens: int) -> int:
        """Return the number of image tokens in the prompt; the chat template has one placeholder per image."""
        messages = request["messages"]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        others = len(self.tokenizer(text)["input_ids"]) - (_asked(request)["image"] is not None)
        return num_prompt_tokens - others


def _asked(request: dict) -> dict[str, str | None]:
    """Return the text, and the image file in base64."""
    parts = {part["type"]: part[part["type"]] for part in request["messages"][0]["content"]}
    image = parts.get("image")
    return {"text": parts["text"], "image": None if image is None else base64.b64encode(image).decode()}


def _check_sizes(folder: Path, config: ModelConfig) -> None:
    theirs = load_config(folder)
    for name in COMPARED:
        if getattr(theirs, name) != getattr(config, name):
            raise ValueError(
                f"--openvino-model {folder} is another model: its {name} is {getattr(theirs, name)}, but the "
                f"compared model has {getattr(config, name)}"
            )
