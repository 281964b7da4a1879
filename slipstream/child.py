"""A Python process for work that may hang, crash or take all memory: it is at the other end of a pipe, and can be killed.

What such a process does, and what is said through the pipe, is its module's affair (`compiler`, `models.template`,
`serve.engine_main`).
"""

import os
import subprocess
import sys


def spawn(module: str, fd: int, *, is_quiet: bool = True) -> "subprocess.Popen[bytes]":
    """Run a module that takes the number of its end of a pipe. A quiet one says nothing and has no GPU.

    Not by multiprocessing, which would run the caller's script once more. In a session of its own: ^C is not for it.
    It imports from where this process does and, by -P, from nowhere else: the current folder may be a model's, and a file
    there called json.py must not be imported.
    """
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment = os.environ | {"PYTHONPATH": paths} | ({"CUDA_VISIBLE_DEVICES": ""} if is_quiet else {})
    output = subprocess.DEVNULL if is_quiet else None
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(fd)], pass_fds=(fd,), env=environment, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=output, stderr=output,
    )  # fmt: skip


def limit_memory(more_bytes: int) -> None:
    """Of this process, to what it has and so much more: beyond it this process fails, and the machine does not."""
    if sys.platform != "linux":
        return
    import resource

    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (taken + more_bytes, taken + more_bytes))
