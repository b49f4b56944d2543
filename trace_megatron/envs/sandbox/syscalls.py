"""The filter of system calls for model-written code: no processes, programs, sockets, mounts or hidden memory.

A classic BPF program, built for the one process that installs it (seccomp(2)). Used by worker.py inside the sandbox, so
it imports only the standard library. Without processes, the limits of one process are the limits of the code.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct

_X86_64 = {
    "denied": {
        "fork": 57,
        "vfork": 58,
        "execve": 59,
        "execveat": 322,
        "ptrace": 101,
        "process_vm_readv": 310,
        "process_vm_writev": 311,
        "tkill": 200,
        "rt_sigqueueinfo": 129,
        "rt_tgsigqueueinfo": 297,
        "socket": 41,
        "memfd_create": 319,  # memory that no limit of the process counts
        "memfd_secret": 447,
        "shmget": 29,
        "msgget": 68,
        "semget": 64,
        "mq_open": 240,
        "unshare": 272,
        "setns": 308,
        "mount": 165,
        "umount2": 166,
        "pivot_root": 155,
        "chroot": 161,
        "bpf": 321,
        "perf_event_open": 298,
        "userfaultfd": 323,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "open_by_handle_at": 304,
    },
    "clone": 56,
    "signals": (62, 234),  # kill, tgkill
    "audit": 0xC000003E,
}
_AARCH64 = {
    "denied": {
        "execve": 221,
        "execveat": 281,
        "ptrace": 117,
        "process_vm_readv": 270,
        "process_vm_writev": 271,
        "tkill": 130,
        "rt_sigqueueinfo": 138,
        "rt_tgsigqueueinfo": 240,
        "socket": 198,
        "memfd_create": 279,
        "memfd_secret": 447,
        "shmget": 194,
        "msgget": 186,
        "semget": 190,
        "mq_open": 180,
        "unshare": 97,
        "setns": 268,
        "mount": 40,
        "umount2": 39,
        "pivot_root": 41,
        "chroot": 51,
        "bpf": 280,
        "perf_event_open": 241,
        "userfaultfd": 282,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "open_by_handle_at": 265,
    },
    "clone": 220,
    "signals": (129, 131),
    "audit": 0xC00000B7,
}
_MACHINES = {"x86_64": _X86_64, "aarch64": _AARCH64}
# The same numbers on both: io_uring_setup, io_uring_register, open_tree, move_mount, fsopen, fsmount, pidfd_open,
# pidfd_send_signal, pidfd_getfd, process_madvise, mount_setattr.
_DENIED_EVERYWHERE = (425, 427, 428, 429, 430, 432, 434, 424, 438, 440, 442)
_CLONE3 = 435
_CLONE_THREAD = 0x10000
_X32_BIT = 0x40000000  # x86-64's second table of system calls

_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data, little endian
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def die_with_parent() -> None:
    """Without a sandbox, whose end takes all with it, code that sleeps would outlive its worker."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def install_filter() -> None:
    """Bind this process, which must have one thread; raises OSError where the kernel has no filters."""
    if platform.machine() not in _MACHINES:
        raise OSError(f"no filter of system calls for the machine {platform.machine()}")
    code = _build(os.getpid(), _MACHINES[platform.machine()])
    program = _Program(len(code) // 8, code)
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or _libc.prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        number = ctypes.get_errno()
        raise OSError(number, f"the kernel refused the filter of system calls: {os.strerror(number)}")


def _build(pid: int, machine: dict) -> bytes:
    fail = _FAIL | errno.EPERM
    rows = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, machine["audit"]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, fail),
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),  # the C library falls back to clone, whose flags can be seen
        (_EQUAL, 0, 4, machine["clone"]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, fail),
        (_RETURN, 0, 0, _ALLOW),
    ]
    for number in machine["signals"]:  # only to itself
        rows += [
            (_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, _FIRST_ARGUMENT),
            (_EQUAL, 1, 0, pid),
            (_RETURN, 0, 0, fail),
            (_RETURN, 0, 0, _ALLOW),
        ]
    for number in (*machine["denied"].values(), *_DENIED_EVERYWHERE):
        rows += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, fail)]
    rows.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *row) for row in rows)
