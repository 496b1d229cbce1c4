"""The `mmvllm` command, which is also `python -m mmvllm`."""

import os
import signal
import sys


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns its exit code. The process must run nothing else.

    Until a command handles SIGINT itself, Ctrl-C ends the process at once, without a traceback: wherever Python raised
    KeyboardInterrupt, in the middle of an import say, there is nothing to clean up yet. SIGTERM does the same.
    """
    if os.name == "posix" and os.getpid() == 1:
        from mmvllm.processes.signals import run_below_first_process

        run_below_first_process()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell has it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from mmvllm.cli.main import main as run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
