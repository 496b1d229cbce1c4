"""`python -m mmvllm` is the `mmvllm` command."""

import sys

from mmvllm.cli.main import main

sys.exit(main())
