"""The example of embeddings and scores runs."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "embeddings.py"


@pytest.mark.spawns
def test_an_image_is_nearest_to_itself():
    done = subprocess.run([sys.executable, "-W", "ignore", SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, *scores, best = done.stdout.splitlines()
    name = first.rpartition(" ")[2]
    assert first == f"the nearest to {name}: {name}" and len(scores) == 3 and best.startswith("the most likely: There")
