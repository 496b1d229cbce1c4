"""The `mmvllm` command, which is also `python -m mmvllm`."""

import os
import signal
import sys


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code; the process must run nothing else.

    Until a command handles SIGINT itself, Ctrl-C ends the process at once and without a traceback, and so does SIGTERM.
    There is nothing to clean up before that, not even in the middle of an import.
    """
    if os.getpid() == 1:
        from mmvllm.processes.signals import run_below_first_process

        run_below_first_process()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may have set it to be ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from mmvllm.cli.main import main as run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
