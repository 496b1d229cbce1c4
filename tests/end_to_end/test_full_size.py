"""Models of published sizes with random weights answer on a CPU, in the memory that `mmvllm info` predicts."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mmvllm.cli.main import main
from tests.helpers.models.metadata import ROOT, needs_metadata

# A model, and another whose tokenizer is the same, for a folder without vocabulary.
MODELS = {
    "Qwen2.5-VL-3B-Instruct": "Qwen2.5-VL-7B-Instruct",
    "Qwen3-VL-2B-Instruct": "Qwen3-VL-4B-Instruct",
    "Qwen3-VL-4B-Instruct": "Qwen3-VL-4B-Instruct",
}
CACHES = ["--cpu-kvcache-bytes", str(64 * 2**20), "--encoder-cache-bytes", str(64 * 2**20)]
MEMINFO = Path("/proc/meminfo")
ANSWER = """
import json, re, sys
from PIL import Image
from mmvllm import LLM

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

caches = {"cpu_kvcache_bytes": 64 * 2**20, "encoder_cache_bytes": 64 * 2**20}
options = {"load_format": "dummy", "dtype": "bfloat16", "device": "cpu", "quantization": json.loads(sys.argv[2])}
llm = LLM(sys.argv[1], **options, **caches)
loading = peak()
open("/proc/self/clear_refs", "w").write("5")  # begins a new peak
content = [{"type": "image", "image": Image.effect_noise((448, 448), 50)}, {"type": "text", "text": "What is it?"}]
params = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
output = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)[0]
answering = peak()
clip = [Image.effect_noise((224, 224), 50)] * 3
content = [{"type": "video", "video": clip}, {"type": "text", "text": "What is it?"}]
watched = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)[0]
numbers = [(len(one.token_ids), one.num_image_tokens, one.num_video_tokens) for one in (output, watched)]
print(json.dumps([numbers, loading, answering]))
"""


@pytest.mark.slow
@needs_metadata
@pytest.mark.skipif(not MEMINFO.is_file(), reason="reads the use of memory from /proc")
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_published_sizes_answer_in_the_predicted_memory(name, quantization, tmp_path, capsys):
    if int(re.search(r"MemAvailable:\s+(\d+) kB", MEMINFO.read_text())[1]) < 12e6:
        pytest.skip("needs 12 GB of memory")
    for source in (MODELS[name], name):
        for path in (ROOT / source).iterdir():
            if source == name or path.name in ("vocab.json", "merges.txt"):
                (tmp_path / path.name).unlink(missing_ok=True)
                (tmp_path / path.name).symlink_to(path)
    command = [sys.executable, "-c", ANSWER, str(tmp_path), json.dumps(quantization)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stderr
    numbers, loading, answering = json.loads(done.stdout.splitlines()[-1])
    assert numbers == [[8, 256 if "2.5" in name else 196, 0], [8, 0, 128 if "2.5" in name else 98]]

    assert main(["info", "--model", str(tmp_path), "--device", "cpu", *CACHES]) == 0
    row = re.search(rf"^  {quantization or 'bfloat16'} +(.*)$", capsys.readouterr().out, re.M)[1]
    sizes = [float(size) * 2**30 for size in re.findall(r"([\d.]+) GiB(?= =| while)", row)]
    assert answering == pytest.approx(sizes[0], rel=0.1)
    assert loading <= 1.1 * max(sizes)
