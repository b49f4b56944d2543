"""Inside the sandbox: a warm interpreter that forks one process for each request. Started by pool.py.

A request is a JSON line {"earlier": [code], "code": code, "replay_s": s}; the answer is a line {"output", "error",
"finished", "digests"}. The process of a request runs the earlier cells again without showing their output, then the
new one: that is how a state is restored. It is ended afterwards whatever it did, and its files are removed.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import importlib
import io
import json
import linecache
import math
import os
import random
import resource
import select
import shutil
import signal
import sys
import time
import traceback

from syscalls import die_with_parent, install_filter

WALL_PER_CPU = 3  # wall-clock seconds for each second of processor time, for code that sleeps and busy machines
# What such code imports most, so that no request has to.
_USUAL = (
    "bisect",
    "cmath",
    "collections",
    "copy",
    "datetime",
    "decimal",
    "fractions",
    "functools",
    "heapq",
    "itertools",
)
_USUAL += ("math", "operator", "re", "statistics", "string", "typing")
_MAX_ANSWER_BYTES = 1 << 20
_MAX_FILES = 64
_REPLAYED = b"\n"  # on the pipe, when the earlier cells have run


def main(settings: dict) -> None:
    """Serve requests until the input ends. ``settings``: cpu_s, memory_bytes, file_bytes, output_bytes, folder."""
    for name in (*_USUAL, *settings["imports"]):
        importlib.import_module(name)
    if "numpy" in sys.modules:  # every request starts with the generator as it is now
        importlib.import_module("numpy.random").seed(0)
    if "sympy" in sys.modules:
        _warm_up(sys.modules["sympy"])
    os.chdir(settings["folder"])
    gc.freeze()
    if _run_request({"earlier": [], "code": "1 + 1", "replay_s": 60.0}, settings).get("output") != "2\n":
        sys.exit("the limits or the filter of system calls do not work here")
    _send({"ready": True})
    for line in sys.stdin.buffer:
        start_s = time.monotonic()
        answer = _run_request(json.loads(line), settings)
        answer["seconds"] = time.monotonic() - start_s
        _empty(settings["folder"])
        _send(answer)


def _warm_up(sympy: object) -> None:
    """What SymPy imports and builds at the first use would otherwise cost every request up to 0.1 s."""
    x, y = sympy.symbols("x y")
    sympy.simplify(sympy.factor(x**2 - 1) / (x - 1))
    sympy.solve([x + y - 3, x - y - 1], [x, y])
    sympy.solve(x**2 - x - 1, x)


def _send(message: dict) -> None:
    sys.stdout.buffer.write(json.dumps(message).encode() + b"\n")
    sys.stdout.buffer.flush()


def _empty(folder: str) -> None:
    """Remove what the code left. An error ends the worker, and a new one takes its place."""
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def _run_request(request: dict, settings: dict) -> dict:
    source, sink = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(source)
        _run_cells(request, settings, sink)  # does not return
    os.close(sink)
    try:
        received, in_time = _receive(source, request["replay_s"], WALL_PER_CPU * settings["cpu_s"])
    finally:
        os.close(source)
        os.kill(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
    replayed = received.startswith(_REPLAYED)
    answer = _read_answer(received, len(request["earlier"]) + 1) if in_time and replayed else None
    if answer:
        return {**answer, "finished": True, "replayed": True}
    signal_number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    cpu_s = usage.ru_utime + usage.ru_stime
    reason = "the code stopped the interpreter"
    if not in_time or signal_number == signal.SIGXCPU or (signal_number and cpu_s >= settings["cpu_s"]):
        reason = f"the code took longer than {settings['cpu_s']:g} s"
    elif signal_number and signal_number != signal.SIGKILL:
        reason = f"the code crashed the interpreter ({signal.Signals(signal_number).name})"
    return {"output": "", "error": reason, "finished": False, "replayed": replayed, "digests": []}


def _read_answer(received: bytes, num_cells: int) -> dict | None:
    """The process's answer, None if it is none: the code may have written to the pipe."""
    try:
        answer = json.loads(received.removeprefix(_REPLAYED))
        output, error, digests = answer["output"], answer["error"], answer["digests"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    texts = [output, error or "", *digests] if isinstance(digests, list) and len(digests) == num_cells else [None]
    return {"output": output, "error": error, "digests": digests} if all(isinstance(t, str) for t in texts) else None


def _receive(source: int, replay_s: float, run_s: float) -> tuple[bytes, bool]:
    """What the process wrote until it closed the pipe, and whether that was in time."""
    received = b""
    deadline = time.monotonic() + replay_s
    while len(received) <= _MAX_ANSWER_BYTES:
        ready, _, _ = select.select([source], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return received, False
        chunk = os.read(source, 1 << 16)
        if not chunk:
            return received, True
        if not received:
            deadline = time.monotonic() + run_s
        received += chunk
    return received, False


def _run_cells(request: dict, settings: dict, sink: int) -> None:
    """In the process of the request: limits, earlier cells, the new cell, the answer."""
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        os.closerange(3, sink)
        os.closerange(sink + 1, 256)
        _limit(settings)
        random.seed(0)  # which a fork had seeded anew
        namespace = {"__name__": "__main__", "__builtins__": __builtins__}
        digests = [
            _run_cell(code, number, namespace, settings["output_bytes"])[2]
            for number, code in enumerate(request["earlier"], start=1)
        ]
        used_s = time.process_time()
        limit_s = math.ceil(used_s + settings["cpu_s"])
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 1))  # a signal, and a second later the end
        os.write(sink, _REPLAYED)
        output, error, digest = _run_cell(request["code"], len(digests) + 1, namespace, settings["output_bytes"])
        answer = {"output": output, "error": error, "digests": [*digests, digest]}
        with open(sink, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())
    finally:
        os._exit(0)


def _limit(settings: dict) -> None:
    limits = {
        resource.RLIMIT_AS: settings["memory_bytes"],
        resource.RLIMIT_FSIZE: settings["file_bytes"],
        resource.RLIMIT_NOFILE: _MAX_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))
    die_with_parent()
    install_filter()


def _run_cell(code: str, number: int, namespace: dict, output_bytes: int) -> tuple[str, str | None, str]:
    """Output, the traceback of an error, and a digest of both. A last expression is shown, as in a notebook."""
    name = f"<cell {number}>"
    sink = _Sink(output_bytes)
    error = None
    sys.stdout = sys.stderr = io.TextIOWrapper(sink, encoding="utf-8", errors="backslashreplace", write_through=True)
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    try:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), namespace)
        if last:
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
            if value is not None:
                print(repr(value))
    except SystemExit:
        error = "SystemExit: the code ended the interpreter"
    except BaseException as raised:  # whatever the code raises is its output
        error = _describe(raised, name)
    sink.close()
    output, error = _readable(bytes(sink.kept)), error and _readable(error.encode("utf-8", "replace")[-output_bytes:])
    if sink.total > output_bytes:
        output += f"\n[cut after {output_bytes} of {sink.total} bytes]"
    digest = hashlib.blake2b(sink.digest.digest() + (error or "").encode(), digest_size=8).hexdigest()
    return output, error, digest


def _describe(raised: BaseException, name: str) -> str:
    """The traceback from the cell on."""
    frames = raised.__traceback__
    while frames and frames.tb_frame.f_code.co_filename != name:
        frames = frames.tb_next
    try:
        return "".join(traceback.format_exception(type(raised), raised, frames, limit=-8)).strip()
    except BaseException:  # an exception of the code's own that cannot be shown
        return type(raised).__name__


def _readable(data: bytes) -> str:
    """Text in which whatever cannot be printed is spelled out."""
    text = data.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


class _Sink(io.RawIOBase):
    """Keeps the beginning of what is written, and counts and digests the rest."""

    def __init__(self, limit: int) -> None:
        self.kept = bytearray()
        self.total = 0
        self.digest = hashlib.blake2b(digest_size=8)
        self._limit = limit

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        data = bytes(data)
        self.kept += data[: max(0, self._limit - len(self.kept))]
        self.total += len(data)
        self.digest.update(data)
        return len(data)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
