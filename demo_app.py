"""The same as `mmvllm demo`: `python demo_app.py` opens a page to talk about pictures with the bundled model."""

import sys

from mmvllm.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))
