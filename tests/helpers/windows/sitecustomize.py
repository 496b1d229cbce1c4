"""Shows mmvllm's modules what Python has on Windows; imported at the start of Python if this folder is on PYTHONPATH.

Other packages see this system, which they need to run. Windows is imitated by this: modules and names that it lacks;
open files that can be neither renamed nor deleted; files that are flushed only if they may be written to; line ends
that are changed in files opened without O_BINARY; and waits of the main thread that no signal interrupts.
"""

import builtins
import errno
import fcntl
import os
import signal
import struct
import threading
from types import ModuleType

ABSENT = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "triton", "tty", "uvloop"}
# From the documentation of os: "Availability: Unix, not Windows".
NOT_IN_OS = """
    O_CLOEXEC O_DIRECTORY O_DSYNC O_NOCTTY O_NOFOLLOW O_NONBLOCK O_PATH O_SYNC O_TMPFILE WNOHANG chown chroot confstr
    eventfd fchdir fchmod fchown fork forkpty getegid geteuid getgid getgroups getloadavg getpgid getpgrp getpriority
    getresuid getsid getuid killpg lchown lockf major minor mkfifo mknod nice openpty pathconf pipe2 posix_fadvise
    posix_fallocate posix_spawn pread preadv pwrite pwritev sched_getaffinity sched_setaffinity sched_yield sendfile
    setegid seteuid setgid setpgid setpriority setsid setuid splice statvfs sync sysconf sysconf_names tcgetpgrp
    tcsetpgrp uname wait wait3 wait4 waitid writev
"""
IN_SIGNAL = """
    SIGABRT SIGFPE SIGILL SIGINT SIGSEGV SIGTERM SIG_DFL SIG_IGN Handlers Signals default_int_handler getsignal
    raise_signal set_wakeup_fd signal strsignal valid_signals
"""
O_BINARY = 0x8000
texts: set[int] = set()  # files that were opened without O_BINARY


def open_as_on_windows(path, flags, mode=0o777):
    file = os.open(path, flags & ~O_BINARY, mode)
    (texts.discard if flags & O_BINARY else texts.add)(file)
    return file


def write_as_on_windows(file, data):
    changed = data.replace(b"\n", b"\r\n") if file in texts else data
    return min(os.write(file, changed), len(data))


def locking(file, mode, num_bytes):
    """Lock bytes from the file's position on. The lock is that of the open file, as on Windows."""
    assert mode == msvcrt.LK_NBLCK
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_CUR, 0, num_bytes, 0)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
    except BlockingIOError:
        raise PermissionError(errno.EACCES, "Permission denied") from None


def copied(module: ModuleType, names) -> ModuleType:
    copy = ModuleType(module.__name__)
    copy.__dict__.update({name: getattr(module, name) for name in names if hasattr(module, name)})
    return copy


msvcrt = ModuleType("msvcrt")
msvcrt.LK_NBLCK, msvcrt.locking = 2, locking
windows_os = copied(os, set(dir(os)) - set(NOT_IN_OS.split()))
windows_os.name, windows_os.O_BINARY, windows_os.supports_dir_fd = "nt", O_BINARY, set()
windows_os.open, windows_os.write = open_as_on_windows, write_as_on_windows
windows_os.fsdecode = lambda name: name.decode() if isinstance(name, bytes) else os.fsdecode(name)
REPLACED = {os: windows_os, signal: copied(signal, IN_SIGNAL.split())}
real_import = builtins.__import__


def import_as_on_windows(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {}).get("__spec__")
    if importer is None or importer.name.partition(".")[0] != "mmvllm":
        return real_import(name, globals, locals, fromlist, level)
    if name.partition(".")[0] in ABSENT:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    module = msvcrt if name == "msvcrt" else real_import(name, globals, locals, fromlist, level)
    return REPLACED.get(module, module)


def only_if_closed(change):
    def checked(path, *args, **kwargs):
        for one in (path, *args):
            if os.path.basename(one).startswith("pym-"):  # shared memory, on Windows without a file
                continue
            real = os.path.realpath(one)
            for number in os.listdir("/proc/self/fd"):
                if os.path.realpath(f"/proc/self/fd/{number}") == real:
                    raise PermissionError(errno.EACCES, "The file is used by another process", os.fspath(one))
        return change(path, *args, **kwargs)

    return checked


def fsync(file, real=os.fsync):
    if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "Bad file descriptor")
    real(file)


def wait(self, timeout=None, real=threading.Condition.wait):
    if threading.current_thread() is not threading.main_thread():
        return real(self, timeout)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        return real(self, timeout)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


builtins.__import__ = import_as_on_windows
os.replace, os.rename, os.unlink = only_if_closed(os.replace), only_if_closed(os.rename), only_if_closed(os.unlink)
windows_os.replace, windows_os.rename, windows_os.unlink = os.replace, os.rename, os.unlink
os.fsync = windows_os.fsync = fsync
threading.Condition.wait = wait
