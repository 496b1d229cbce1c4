"""`mmvllm demo` without installation: serves a chat page for images and videos with the bundled model."""

import sys

from mmvllm.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))
