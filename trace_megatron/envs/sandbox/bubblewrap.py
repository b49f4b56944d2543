"""The command that starts a worker: bubblewrap with nothing of the host but what the interpreter needs, read only."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trace_megatron.errors import UserError

PACKAGES = ("numpy", "mpmath", "sympy")
"""Offered to the code where the host has them."""

_HERE = Path(__file__).parent
_FOLDER = "/tmp"
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # a replay must see sets in the same order
    "PYTHONPATH": "/packages",
    "LD_LIBRARY_PATH": "/python/shared",
    "OPENBLAS_NUM_THREADS": "1",
    "HOME": _FOLDER,
    "LANG": "C.UTF-8",
}


def sandboxed_command(settings: dict[str, Any], disk_bytes: int) -> list[str]:
    """bubblewrap's command line for worker.py with ``settings``; raises UserError where bubblewrap does not work."""
    command = [*_isolation(), "--size", str(disk_bytes), "--tmpfs", _FOLDER, "--chdir", _FOLDER]
    command += ["--remount-ro", "/dev", "--remount-ro", "/"]
    python = [*command, "--", "/python/bin/python3", "-s", "-S", "-B"]
    _check(tuple([*python, "-c", "pass"]))
    return [*python, "/sandbox/worker.py", json.dumps(settings | {"folder": _FOLDER, "imports": _found_packages()})]


def unsafe_command(settings: dict[str, Any], folder: str) -> tuple[list[str], dict[str, str]]:
    """The same worker without a sandbox, with its environment: limits and the filter of system calls still hold."""
    settings = settings | {"folder": folder, "imports": _found_packages()}
    variables = {name: _ENVIRONMENT[name] for name in ("PYTHONHASHSEED", "OPENBLAS_NUM_THREADS", "LANG")}
    return [sys.executable, "-s", "-B", str(_HERE / "worker.py"), json.dumps(settings)], variables


@functools.cache
def _check(command: tuple[str, ...]) -> None:
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if run.returncode:
        raise UserError(
            f"expected bubblewrap to start an isolated interpreter, found: {' '.join(run.stderr.split())[-300:]}: "
            f"allow user namespaces and use bubblewrap 0.8 or newer, or set env.params.sandbox=unsafe on a machine "
            f"whose files and network the policy may reach"
        )


@functools.cache
def _isolation() -> tuple[str, ...]:
    program = shutil.which("bwrap")
    if not program:
        raise UserError(
            "expected bubblewrap to isolate model-written code, found none: apt-get install bubblewrap, or set "
            "env.params.sandbox=unsafe on a machine whose files and network the policy may reach"
        )
    options = [program, "--unshare-all", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
    options += ["--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv", "--dev", "/dev"]
    for name, value in _ENVIRONMENT.items():
        options += ["--setenv", name, value]
    for source, target in _read_only_files():
        options += ["--ro-bind", str(source), target]
    options += ["--tmpfs", f"{_library()}/site-packages"] if (_stdlib() / "site-packages").is_dir() else []
    return tuple(options)


def _read_only_files() -> Iterator[tuple[Path, str]]:
    """What the interpreter needs, and where it stands in the sandbox."""
    executable = Path(sys.executable).resolve()
    yield executable, "/python/bin/python3"
    yield _stdlib(), _library()
    for name in _found_packages():
        folder = _package_folder(name)
        yield folder, f"/packages/{name}"
        libraries = folder.with_name(f"{name}.libs")
        if libraries.is_dir():
            yield libraries, f"/packages/{libraries.name}"
    for name, path in _shared_libraries(executable).items():
        yield path, name if name.startswith("/") else f"/python/shared/{name}"
    for name in ("worker.py", "syscalls.py"):
        yield _HERE / name, f"/sandbox/{name}"


def _stdlib() -> Path:
    return Path(sysconfig.get_path("stdlib")).resolve()


def _library() -> str:
    return f"/python/{sys.platlibdir}/{_stdlib().name}"


def _found_packages() -> list[str]:
    return [name for name in PACKAGES if importlib.util.find_spec(name)]


def _package_folder(name: str) -> Path:
    return Path(importlib.util.find_spec(name).origin).parent.resolve()


def _shared_libraries(executable: Path) -> dict[str, Path]:
    """Name (the loader: path) -> file of every shared library that the interpreter or a package loads."""
    modules = [executable, *(_stdlib() / "lib-dynload").glob("*.so")]
    modules += [module for name in _found_packages() for module in _package_folder(name).rglob("*.so")]
    listing = subprocess.run(
        ["ldd", *map(str, modules)], capture_output=True, text=True, env={"PATH": os.environ.get("PATH", "")}
    ).stdout
    named = re.findall(r"^\s*(\S+) => (/\S+) \(", listing, re.M)
    loaders = re.findall(r"^\s*(/\S+) \(", listing, re.M)
    return {name: Path(path).resolve() for name, path in [*named, *((loader, loader) for loader in loaders)]}
