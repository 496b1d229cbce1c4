"""OpenVINO GenAI's continuous batching in a separate process, which `mmvllm.bench.openvino` starts.

Reads requests and writes measurements, one JSON object per line. The interpreter's environment may lack mmvllm, so only
the standard library and, in functions, openvino_genai, its dependencies and Pillow are imported.
"""

import base64
import io
import json
import os
import resource
import signal
import sys
import time
from typing import Any

CACHE_GIB = 2  # of the KV cache, more than the benchmarks' requests need


class OpenVinoGenai:
    """A converted model; `settings` has the folder "model", "max_num_seqs" and "threads"."""

    def __init__(self, settings: dict):
        import openvino
        import openvino_genai
        from PIL import Image

        self.genai, self.tensor, self.open_image = openvino_genai, openvino.Tensor, Image.open
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.cache_size, scheduling.max_num_seqs = CACHE_GIB, settings["max_num_seqs"]
        scheduling.enable_prefix_caching = False  # all images are different
        properties = {"INFERENCE_NUM_THREADS": settings["threads"]}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(settings["model"], scheduling, "CPU", properties)
        self.num_requests = 0

    def run(self, requests: list[dict], output_tokens: int) -> dict[str, Any]:
        """Submit all `requests`, texts with an image file in base64 or None; return measurements, from time.time()."""
        start = time.time()
        handles = [self._add(request, output_tokens) for request in requests]
        tokens, times, decode_seconds = [[] for _ in handles], [[] for _ in handles], []
        while self.pipeline.has_non_finished_requests():
            is_decode, since = all(tokens), time.time()
            self.pipeline.step()
            now = time.time()
            for handle, its_tokens, its_times in zip(handles, tokens, times, strict=True):
                if new := self._new_tokens(handle):
                    its_tokens += new
                    its_times.append(now)
            if is_decode:
                decode_seconds.append(now - since)
        answers = [
            {"token_ids": ids, "first_token_time": when[0], "finish_time": when[-1], "num_prompt_tokens": length}
            for ids, when, length in zip(tokens, times, map(_prompt_length, handles), strict=True)
        ]
        seconds = time.time() - start
        return {"start": start, "seconds": seconds, "answers": answers, "decode_seconds": decode_seconds}

    def _add(self, request: dict, output_tokens: int) -> Any:
        """Submit a request and return its handle; the image is encoded here."""
        options = self.genai.GenerationConfig()
        options.max_new_tokens, options.ignore_eos, options.do_sample = output_tokens, True, False
        self.num_requests += 1
        images = [] if request["image"] is None else [self._pixels(request["image"])]
        return self.pipeline.add_request(self.num_requests, request["text"], images, options)

    def _pixels(self, data: str) -> Any:
        """Decode an image as a tensor (1, H, W, 3)."""
        import numpy as np

        image = self.open_image(io.BytesIO(base64.b64decode(data))).convert("RGB")
        return self.tensor(np.asarray(image)[None])

    @staticmethod
    def _new_tokens(handle: Any) -> list[int]:
        return [token for part in handle.read().values() for token in part.generated_ids] if handle.can_read() else []


def _prompt_length(handle: Any) -> int:
    return handle.get_vlm_perf_metrics().get_num_input_tokens()


def _peak_memory() -> int:
    """Peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    """Serve until the input ends: the first line has the settings, each further line the arguments of `run`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries is not a reply

    def reply(value: dict) -> None:
        print(json.dumps(value), file=replies)

    try:
        engine = OpenVinoGenai(json.loads(sys.stdin.readline()))
        reply({"version": engine.genai.__version__})
        for line in sys.stdin:
            reply(engine.run(**json.loads(line)) | {"peak_memory": _peak_memory()})
    except ImportError as error:
        reply({"missing": str(error)})
    except Exception as error:  # openvino raises RuntimeError and others
        reply({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules others must not import
    main()
