"""Values of the demo page's controls."""

from mmvllm.demo.conversation import Options

OPTIONS = Options("", 0, 1, 0, 1, 900, -1, 3136, 20_000)
