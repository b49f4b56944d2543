"""Hugging Face folder -> Megatron-Core distributed checkpoint, and back: rows copied between the files of two folders.

A conversion works in a hidden folder beside its target, which it renames when everything is there. One that was
interrupted goes on from there; one that failed on bad input removes it.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from trace_megatron.errors import UserError
from trace_megatron.log import say
from trace_megatron.policy.dist_files import MegatronFolder, MegatronWriter
from trace_megatron.policy.hf_config import HFModelConfig, read_hf_config
from trace_megatron.policy.hf_files import HFFolder, HFWriter, copy_companions, file_stamp
from trace_megatron.policy.layout import check_tensor_parallel
from trace_megatron.policy.names import ParallelSizes, Weight, checkpoint_keys, exported_weights, model_weights
from trace_megatron.policy.rows import Rows, copy_rows
from trace_megatron.policy.run_checkpoint import RunCheckpoint, is_run_checkpoint
from trace_megatron.types import TensorInfo

_COMMIT_BYTES = 2**29
"""After this much a stretch goes to the disk and into the journal; an interruption loses two of them at most, and the
weights ahead."""
_NUM_COPYING, _NUM_AHEAD = 2, 16
"""Threads, of which one leaves a fast disk waiting, and weights that are copied or wait for a thread."""
_SPARE_BYTES = 2**26
"""For index, tokenizer and what torch writes around a tensor."""
_DESCRIPTION, _JOURNAL = "conversion.json", "conversion.jsonl"


def hf_to_megatron(source: str | Path, target: str | Path, ranks: ParallelSizes) -> None:
    """Write the model of an HF folder as a checkpoint cut for ``ranks``; any layout can load it.

    Raises UserError for a model that is not whole, a layout that its shapes forbid, an existing target, a full disk.
    """
    source, target = Path(source), Path(target)
    hf = read_hf_config(source)
    _check_ranks(hf, ranks)
    weights = exported_weights(hf)
    folder = HFFolder(source, model_weights(hf))
    _check_dtypes(folder, weights, source)
    sizes = [sum(folder.dtype(name).itemsize * math.prod(shape) for name, shape in w.hf.items()) for w in weights]
    dtypes = [folder.dtype(next(iter(weight.hf))) for weight in weights]
    layout = [ranks.tensor, ranks.pipeline, ranks.expert]
    # torch's version, as what it writes around a tensor decides where the next one lies
    description = {"to": "megatron", "ranks": layout, "torch": torch.__version__, "source": folder.stamp()}
    with _work_folder(target, description, sum(sizes)) as work:
        writer = MegatronWriter(work.folder, hf, ranks)
        for weight, dtype in zip(weights[: work.num_done], dtypes, strict=False):
            writer.skip(weight, dtype)
        waiting = zip(weights[work.num_done :], dtypes[work.num_done :], strict=True)
        targets = (writer.place(weight, dtype) for weight, dtype in waiting)
        _stream(weights, sizes, folder.rows, targets, writer.open_files, work)
        writer.write_extra_states()
        writer.close()
        copy_companions(source, work.folder, dtype=None)


def megatron_to_hf(source: str | Path, target: str | Path, like: str | Path | None = None) -> None:
    """Write the model of a distributed checkpoint, or of a run's own (``checkpoints/step_.../policy``), as an HF folder
    that transformers and vLLM load.

    ``like`` is an HF folder with the model's config.json and tokenizer, where the checkpoint carries none. Raises
    UserError as ``hf_to_megatron``.
    """
    source, target = Path(source), Path(target)
    like = Path(like) if like is not None else source
    if not (like / "config.json").is_file():
        raise UserError(f"expected config.json in '{like}', found none: name the model's HF folder with --like")
    hf = read_hf_config(like)
    weights = exported_weights(hf)
    folder = (RunCheckpoint if is_run_checkpoint(source) else MegatronFolder)(source, weights, hf)
    infos = [TensorInfo(name, shape, folder.dtype(weight)) for weight in weights for name, shape in weight.hf.items()]
    sizes = [sum(folder.dtype(w).itemsize * math.prod(shape) for shape in w.hf.values()) for w in weights]
    description = {"to": "hf", "source": folder.stamp(), "config": file_stamp({like / "config.json"})}
    with _work_folder(target, description, sum(sizes)) as work:
        num_done = sum(len(weight.hf) for weight in weights[: work.num_done])
        writer = HFWriter(work.folder, infos, num_done)
        waiting = iter(infos[num_done:])
        targets = ([writer.place(info) for info in islice(waiting, len(w.hf))] for w in weights[work.num_done :])
        _stream(weights, sizes, folder.rows, targets, writer.open_files, work)
        writer.close()
        dtypes = {info.dtype for info in infos}
        copy_companions(like, work.folder, dtypes.pop() if len(dtypes) == 1 else None)


class _Work:
    """The hidden folder, and the journal of the weights that it holds."""

    def __init__(self, folder: Path, num_done: int):
        self.folder = folder
        self.num_done = num_done
        """As many of the first weights are there."""

    def commit(self, weights: Sequence[Weight], descriptors: Sequence[int]) -> None:
        """Bring the files to the disk, close the descriptors, and make the weights count."""
        for descriptor in descriptors:
            os.fdatasync(descriptor)
            os.close(descriptor)
        with (self.folder / _JOURNAL).open("a") as journal:
            journal.writelines(f"{weight.megatron[0]}\n" for weight in weights)
            journal.flush()
            os.fsync(journal.fileno())


@contextmanager
def _work_folder(target: Path, description: dict[str, Any], num_bytes: int) -> Iterator[_Work]:
    """A folder that becomes ``target`` at the end of the block."""
    if os.path.lexists(target):  # also a link to nothing
        raise UserError(f"expected no folder at '{target}', found one: remove it or choose another name")
    folder = target.absolute().with_name(f".{target.name}.partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / _DESCRIPTION).open("a+")
    except OSError as error:
        raise UserError(f"expected to write to '{folder}', found: {error.strerror}: choose another place") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"expected no other conversion into '{target}', found one at work: wait for it") from None
        num_done = _resume(file, folder, description, target)
        try:
            _check_disk(folder, num_bytes)
        except UserError:
            if not num_done:
                shutil.rmtree(folder)
            raise
        try:
            yield _Work(folder, num_done)
            os.rename(folder, target)
            (target / _JOURNAL).unlink(missing_ok=True)  # not before: what they are of would be taken for another's
            (target / _DESCRIPTION).unlink()
        except UserError:  # it would fail again
            shutil.rmtree(folder)
            raise
        except OSError as error:
            raise UserError(
                f"expected to read and write all of '{target}', found: {error}: mend it, then the same command goes on "
                f"from '{folder}'"
            ) from error
        except BaseException:
            say(f"interrupted: the same command goes on from '{folder}'; remove it to start over")
            raise


def _resume(file: Any, folder: Path, description: dict[str, Any], target: Path) -> int:
    """How many weights are there of an interrupted conversion of the same kind; else start one."""
    file.seek(0)
    text, expected = file.read(), json.dumps(description)
    if not text:
        file.write(expected)
        file.flush()
        return 0
    if text != expected:
        raise UserError(
            f"expected the rest of an interrupted conversion into '{target}', found other options or a changed source: "
            f"remove '{folder}'"
        )
    journal = folder / _JOURNAL
    if not journal.is_file():
        return 0
    text = journal.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:  # the disk was full, or the end came, within a line
        os.truncate(journal, len(whole.encode()))
    num_done = whole.count("\n")
    say(f"going on with the interrupted conversion in '{folder}': {num_done} parameters are there")
    return num_done


def _check_disk(folder: Path, num_bytes: int) -> None:
    blocks = sum(path.stat().st_blocks for path in folder.iterdir() if path.is_file())  # files have holes
    needed = num_bytes + _SPARE_BYTES - 512 * blocks
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"expected {needed / 1e9:.2f} GB of free disk in '{folder.parent}', found {free / 1e9:.2f}: make room"
        )


def _stream(
    weights: Sequence[Weight],
    sizes: Sequence[int],
    source: Callable[[Weight, ExitStack], list[Rows]],
    targets: Iterable[list[Rows]],
    open_files: Callable[[], list[int]],
    work: _Work,
) -> None:
    """Copy each weight that is not there from where ``source`` says to the next of ``targets``, several at a time."""

    def copy(weight: Weight, target: list[Rows]) -> None:
        with ExitStack() as stack:
            for stored, written in zip(source(weight, stack), target, strict=True):
                copy_rows(stored, written)

    waiting = weights[work.num_done :]
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with (
        ThreadPoolExecutor(1) as syncing,
        ThreadPoolExecutor(_NUM_COPYING) as copying,
        Progress(TextColumn("{task.description}"), *columns) as progress,
    ):
        task = progress.add_task("converting", total=sum(sizes), completed=sum(sizes[: work.num_done]))
        try:
            jobs = zip(waiting, targets, strict=True)
            ahead = deque(copying.submit(copy, *job) for job in islice(jobs, _NUM_AHEAD))
            uncommitted, first, pending = 0, 0, None
            for index, size in enumerate(sizes[work.num_done :]):
                ahead.popleft().result()
                ahead.extend(copying.submit(copy, *job) for job in islice(jobs, 1))
                uncommitted += size
                if uncommitted >= _COMMIT_BYTES:
                    if pending:
                        pending.result()
                    duplicates = [os.dup(descriptor) for descriptor in open_files()]
                    pending = syncing.submit(work.commit, waiting[first : index + 1], duplicates)
                    uncommitted, first = 0, index + 1
                progress.advance(task, size)
            if pending:
                pending.result()
        finally:
            copying.shutdown(cancel_futures=True)  # after a failure the rest is in vain


def _check_ranks(hf: HFModelConfig, ranks: ParallelSizes) -> None:
    for option, size in (("--tp", ranks.tensor), ("--pp", ranks.pipeline), ("--ep", ranks.expert)):
        if size < 1:
            raise UserError(f"expected {option} of at least 1, found {size}")
    check_tensor_parallel(hf, ranks.tensor, "--tp")
    if ranks.pipeline > hf.num_layers:
        raise UserError(f"expected --pp of at most the model's {hf.num_layers} layers, found {ranks.pipeline}")
    if ranks.expert > 1 and not hf.num_experts:
        raise UserError(f"expected --ep 1 for a model without experts, found {ranks.expert}")
    if hf.num_experts % ranks.expert:
        raise UserError(f"expected --ep to divide the model's {hf.num_experts} experts, found {ranks.expert}")


def _check_dtypes(folder: HFFolder, weights: Sequence[Weight], source: Path) -> None:
    """A parameter of a checkpoint spans all layers, and has one dtype."""
    dtypes: dict[str, torch.dtype] = {}
    for weight in weights:
        key = checkpoint_keys(weight)[0][0]
        for name in weight.hf:
            dtype = folder.dtype(name)
            if dtypes.setdefault(key, dtype) is not dtype:
                raise UserError(
                    f"expected tensor '{name}' in '{source}' as {dtypes[key]}, like those it is stored with, found "
                    f"{dtype}: save the model in one dtype"
                )
