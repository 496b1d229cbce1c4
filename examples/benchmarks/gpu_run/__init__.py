"""The parts of first_gpu_run.py, which also runs in a checkout that is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
