"""Code that harms: each ends as an error within its limit, and the next snippet finds a sound worker."""

from __future__ import annotations

import asyncio
import os
import re
import time

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_megatron.envs.sandbox import bubblewrap as bubblewrap_module
from trace_megatron.envs.sandbox.pool import Cell, Limits, Sandbox, SandboxError
from trace_megatron.errors import UserError

FORGED = """
import os
for n in range(3, 99):
    try: os.write(n, b'{answer}')
    except OSError: pass
os._exit(0)
"""
ERRORS = {
    "loops for ever": ("while True: pass", "longer than 1 s"),
    "ignores the signal": ("import signal\nsignal.signal(signal.SIGXCPU, lambda *_: 0)\nwhile 1: pass", "longer"),
    "sleeps": ("import time; time.sleep(1000)", "longer than 1 s"),
    "forks": ("import os\nwhile True: os.fork()", "PermissionError"),
    "starts processes": ("import multiprocessing as m\nm.get_context('fork').Process().start()", "Permission"),
    "starts a program": ("import subprocess; subprocess.run(['/python/bin/python3'])", "PermissionError"),
    "starts threads": ("import threading as t\nwhile 1: t.Thread(target=t.Event().wait).start()", "new thread|longer"),
    "allocates 10 GB": ("x = bytearray(10 << 30)", "MemoryError"),
    "allocates little by little": ("x = []\nwhile True: x.append(bytearray(1 << 24))", "MemoryError|stopped"),
    "allocates an array": ("import numpy; numpy.ones(10 << 27)", "Unable to allocate"),
    "hides memory": ("import os; os.memfd_create('x')", "PermissionError"),
    "opens a socket": ("import socket; socket.create_connection(('1.1.1.1', 80))", "PermissionError"),
    "reads a host file": ("print(open('/etc/passwd').read())", "FileNotFoundError"),
    "reads the project": (f"import os; os.listdir({os.getcwd()!r})", "FileNotFoundError"),
    "reads other processes": ("import os; os.listdir('/proc')", "FileNotFoundError"),
    "writes 1 GB": ("f = open('/tmp/x', 'wb')\nfor _ in range(1024): f.write(bytes(1 << 20))", "File too large"),
    "writes many files": ("for i in range(99): open(f'/tmp/{i}', 'wb').write(bytes(1 << 24))", "No space left"),
    "writes elsewhere": ("open('/dev/shm/x', 'w')", "Read-only"),
    "changes the interpreter": ("open('/python/lib/x', 'w')", "Read-only"),
    "exits": ("import sys; sys.exit(3)", "SystemExit"),
    "leaves at once": ("import os; os._exit(0)", "stopped the interpreter"),
    "kills itself": ("import os; os.kill(os.getpid(), 9)", "stopped the interpreter"),
    "kills others": ("import os; os.kill(-1, 9)", "PermissionError"),
    "kills its parent": ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    "recurses": ("f = lambda: f()\nf()", "RecursionError"),
    "does not compile": ("print(", "SyntaxError"),
    "raises what cannot be shown": ("class E(Exception):\n    def __str__(self): raise self\nraise E", "E"),
    "forges an answer": (FORGED.format(answer="{}"), "stopped"),
    "forges a state": (FORGED.format(answer='{"output": "", "error": null, "digests": []}'), "stopped"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_harmful_code_is_an_error_and_the_next_code_runs(name, sandbox, loop):
    code, reason = ERRORS[name]
    (before,) = loop.run(sandbox.run((), "kept = 41")).cells
    start_s = time.perf_counter()
    harmful = loop.run(sandbox.run((before,), code))
    assert time.perf_counter() - start_s < 10
    assert re.search(reason, harmful.error), harmful.error
    assert len(harmful.output) < 1000 and harmful.cells[:1] == (before,)
    after = loop.run(sandbox.run((before,), "import os\nkept += 1\nprint(kept, os.listdir('/tmp'))"))
    assert (after.output, after.error) == ("42 []\n", None)


def test_workers_outlive_their_snippets(sandbox, loop):
    """One request, one process: what a snippet breaks is gone with it, so no worker had to be started again."""
    for code in ("import os; os._exit(0)", "while True: pass"):
        loop.run(sandbox.run((), code))
    assert sandbox.num_started <= 2


def test_a_worker_that_dies_is_replaced(bubblewrap, loop):
    sandbox = Sandbox(Limits(cpu_s=1.0), num_workers=1)
    try:
        loop.run(sandbox.run((), "1"))
        sandbox._idle[0].kill()
        loop.run(sandbox._idle[0].stdout.read())  # until the interpreter inside has followed bubblewrap
        with pytest.raises(SandboxError, match="died"):
            loop.run(sandbox.run((), "1"))
        assert loop.run(sandbox.run((), "2")).output == "2\n"
        assert sandbox.num_started == 2
    finally:
        loop.run(sandbox.close())


def test_a_call_that_is_cancelled_leaves_no_answer_behind(sandbox, loop):
    async def cancelled() -> str:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await sandbox.run((), "import time; time.sleep(0.5); print('late')")
        return (await sandbox.run((), "print('new')")).output

    assert loop.run(cancelled()) == "new\n"


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("x = 3\nx * 2", "6\n"),
        ("None", ""),
        ("print('a', end='')\nimport sys; print('b', file=sys.stderr)", "ab\n"),
        ("import sys; sys.stdout.buffer.write(bytes([0, 255, 10, 65])); print()", "\\x00\\xff\nA\n"),
        ("print('\\x1b[31m ü \\ud800')", "\\x1b[31m ü \\ud800\n"),
        ("print('x' * 10**6)", "x" * 500 + "\n[cut after 500 of 1000001 bytes]"),
        ("import sympy; sympy.sqrt(8)", "2*sqrt(2)\n"),
        ("import numpy; numpy.arange(3).sum()", "np.int64(3)\n"),
        ("import os; os.getuid(), os.listdir('/tmp'), sorted(os.environ)", None),
    ],
)
def test_output(code, output, sandbox, loop):
    run = loop.run(sandbox.run((), code))
    assert run.error is None and run.repeated
    if output is not None:
        assert run.output == output
    else:
        assert "TRACE_DATA" not in run.output and run.output.startswith("(65534, []")


STATEMENTS = st.sampled_from(
    [
        "x = [1]",
        "x.append(len(x))",
        "print(x)",
        "def f(n): return n + len(x)",
        "x = [f(a) for a in x]",
        "import random; print(random.random())",
        "import numpy; print(numpy.random.rand())",
        "print({'a', 'b', 'c', str(x)})",
        "open('note', 'a').write(str(x))",
        "print(open('note').read())",
        "x = x[1:]\nraise ValueError(x)",
        "import os; os._exit(0)",
        "x",
    ]
)


def test_forks_at_every_prefix_see_its_state(sandbox, loop):
    """The reference is one run of everything in order; a fork leaves the original as it was."""

    async def play(codes: list[str], others: list[str]) -> None:
        visited, runs = [()], []
        for code in codes:
            runs.append(await sandbox.run(visited[-1], code))
            visited.append(runs[-1].cells)
        assert all(run.repeated for run in runs)
        for fork in visited:
            for code in others:
                fork = (await sandbox.run(fork, code)).cells
        again = await asyncio.gather(*(sandbox.run(cells, code) for cells, code in zip(visited, codes, strict=False)))
        assert again == runs

    @settings(max_examples=8, deadline=None)
    @given(st.lists(STATEMENTS, min_size=1, max_size=5), st.lists(STATEMENTS, min_size=1, max_size=2))
    def check(codes, others):
        loop.run(play(codes, others))

    check()


def test_code_that_does_not_repeat_itself_is_told(sandbox, loop):
    first = loop.run(sandbox.run((), "import os; print(os.urandom(8))"))
    assert first.repeated and not loop.run(sandbox.run(first.cells, "1")).repeated


def test_a_state_that_cannot_be_restored_is_an_error(sandbox, loop):
    with pytest.raises(SandboxError, match="earlier turn"):
        loop.run(sandbox.run((Cell("import os; os._exit(0)", ""),), "1"))


def folder_of(unsafe: Sandbox) -> str:
    return unsafe._folders[0]


def test_without_bubblewrap_nothing_runs_unless_it_is_wanted(monkeypatch, loop):
    monkeypatch.setenv("PATH", "/nowhere")
    bubblewrap_module._isolation.cache_clear()
    with pytest.raises(UserError, match=r"apt-get install bubblewrap, or set env\.params\.sandbox=unsafe"):
        Sandbox(Limits(), 1)
    unsafe = Sandbox(Limits(cpu_s=1.0), 1, unsafe=True)
    try:
        run = loop.run(unsafe.run((), "import os\nopen('x', 'w').close()\nprint(os.listdir())\nos.fork()"))
        assert run.output == "['x']\n" and "PermissionError" in run.error
        assert loop.run(unsafe.run((), "import os; os.listdir()")).output == "[]\n"
        (worker,) = unsafe._idle
        with pytest.raises(TimeoutError):
            loop.run(asyncio.wait_for(unsafe.run((), "import time; time.sleep(600)"), 0.5))
        assert worker.returncode is not None
        deadline_s = time.monotonic() + 20
        while any(folder_of(unsafe) in str(process.info) for process in psutil.process_iter(["cmdline"])):
            assert time.monotonic() < deadline_s, "the code outlived its worker"
            time.sleep(0.05)
        folder = folder_of(unsafe)
    finally:
        loop.run(unsafe.close())
    assert not os.path.exists(folder)
