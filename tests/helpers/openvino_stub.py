"""Stand-ins for the packages of OpenVINO, of which only the few names exist that the benchmark uses."""

import json
from pathlib import Path

from mmvllm.models.folder import BUNDLED

OPENVINO = """
class Tensor:
    def __init__(self, array):
        self.shape, self.dtype = array.shape, str(array.dtype)
"""

GENAI = '''
import os
from collections import namedtuple

__version__ = "1.2.3"
GenerationConfig = type("GenerationConfig", (), {})
SchedulerConfig = type("SchedulerConfig", (), {})
Part = namedtuple("Part", "generated_ids")


class Handle:
    def __init__(self, length, limit):
        self.length, self.limit, self.made, self.unread = length, limit, 0, []

    def can_read(self):
        return bool(self.unread)

    def read(self):
        unread, self.unread = self.unread, []
        return {0: Part(unread)}

    def get_vlm_perf_metrics(self):
        return self

    def get_num_input_tokens(self):
        return self.length


class ContinuousBatchingPipeline:
    """One prompt is computed per step, and the requests before it get a token."""

    def __init__(self, model, scheduler, device, properties):
        print("a library prints to stdout")
        if os.path.exists(os.path.join(model, "broken")):
            raise RuntimeError("cannot read the model")
        assert device == "CPU" and properties["INFERENCE_NUM_THREADS"] >= 1
        assert scheduler.enable_prefix_caching is False and scheduler.cache_size >= 1 and scheduler.max_num_seqs >= 1
        self.model, self.handles, self.ids = model, [], set()

    def add_request(self, request_id, prompt, images, config):
        assert request_id not in self.ids and prompt and config.ignore_eos and not config.do_sample
        assert all(image.shape == (1, 48, 64, 3) and image.dtype == "uint8" for image in images)
        self.ids.add(request_id)
        self.handles.append(Handle(500 * len(images) + len(prompt), config.max_new_tokens))
        return self.handles[-1]

    def has_non_finished_requests(self):
        return any(handle.made < handle.limit for handle in self.handles)

    def step(self):
        if os.path.exists(os.path.join(self.model, "deadly")):
            os._exit(3)
        for handle in self.handles:
            is_prompt = handle.made == 0
            if handle.made < handle.limit:
                handle.made += 1
                handle.unread.append(7)
            if is_prompt:
                break
'''


def write_stub(folder: Path) -> Path:
    """Write `openvino` and `openvino_genai`; the folder is to be on the path of the interpreter."""
    folder.mkdir()
    (folder / "openvino.py").write_text(OPENVINO)
    (folder / "openvino_genai.py").write_text(GENAI)
    return folder


def write_converted(folder: Path, **sizes: int) -> Path:
    """What is read of a converted model: the bundled one's config, with other sizes of its decoder where given."""
    folder.mkdir()
    config = json.loads((BUNDLED / "config.json").read_text())
    config["text_config"] |= sizes
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "openvino_language_model.xml").touch()
    return folder
