"""Time and memory of a conversion, against copying the same files.

    python tools/bench/bench_convert.py SCRATCH [--config CONFIG.json] [--layers N] [--tp 2] [--pp 2]

Writes a random bfloat16 model of the configuration's shapes into SCRATCH, in files of at most 5 GB, copies it with cp,
converts it to a Megatron checkpoint and back, each in a process of its own, and compares the bytes. Needs three times
the model's size of disk. Before each, dirty pages are written back; after each, the clock runs on until the disk has
everything. Default shapes: Llama-3.1-8B's.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from trace_megatron.policy.hf_config import read_hf_config
from trace_megatron.policy.hf_files import HFWriter
from trace_megatron.policy.names import model_weights
from trace_megatron.types import TensorInfo

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
_NOISE_BYTES = 2**26


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--layers", type=int, help="of another number than the configuration's")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    options = parser.parse_args()
    values = json.loads(options.config.read_text()) if options.config else LLAMA_8B
    if options.layers:
        values["num_hidden_layers"] = options.layers
    folders = {name: options.scratch / name for name in ("model", "copy", "megatron", "back")}
    options.scratch.mkdir(parents=True, exist_ok=True)
    for folder in folders.values():
        shutil.rmtree(folder, ignore_errors=True)
    with multiprocessing.Pool(1) as pool:  # a process's peak counts for those that it starts, too
        num_bytes = pool.apply(write_random_model, (folders["model"], values))
    print(f"{num_bytes / 1e9:.2f} GB of bfloat16, load {os.getloadavg()[0]:.1f}")
    copy_s, _ = timed(["cp", "-r", "--reflink=never", str(folders["model"]), str(folders["copy"])])
    print(f"cp              {copy_s:6.1f} s  {num_bytes / copy_s / 1e9:.2f} GB/s")
    shutil.rmtree(folders["copy"])
    cut = ["--tp", str(options.tp), "--pp", str(options.pp)]
    for label, arguments in (
        ("hf-to-megatron", [str(folders["model"]), str(folders["megatron"]), *cut]),
        ("megatron-to-hf", [str(folders["megatron"]), str(folders["back"])]),
    ):
        seconds, peak = timed([sys.executable, "-m", "trace_megatron.cli", "convert", label, *arguments])
        print(
            f"{label}  {seconds:6.1f} s  {num_bytes / seconds / 1e9:.2f} GB/s  {100 * copy_s / seconds:.0f}% of cp's "
            f"speed  peak memory {peak / 2**30:.2f} GiB  load {os.getloadavg()[0]:.1f}"
        )
    files = sorted(path.name for path in folders["model"].glob("*.safetensors"))
    _, differing, missing = filecmp.cmpfiles(folders["model"], folders["back"], files, shallow=False)
    print("the files came back bit by bit" if not differing + missing else f"different: {differing + missing}")


def write_random_model(folder: Path, values: dict) -> int:
    """Returns the number of bytes. The same noise repeats at odd offsets: nothing here depends on the values."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values))
    weights = [weight for weight in model_weights(read_hf_config(folder)) if not weight.is_copy]
    infos = [TensorInfo(name, shape, torch.bfloat16) for weight in weights for name, shape in weight.hf.items()]
    noise = torch.randn(_NOISE_BYTES // 2).bfloat16()
    writer = HFWriter(folder, infos)
    for index, info in enumerate(infos):
        count = math.prod(info.shape)
        writer.write(info.name, noise.roll(index).repeat(-(-count // len(noise)))[:count].view(info.shape))
    writer.close()
    return sum(2 * math.prod(info.shape) for info in infos)


def timed(command: list[str]) -> tuple[float, int]:
    """Seconds until the disk has everything, and the process's largest resident memory in bytes."""
    os.sync()
    started = time.perf_counter()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    os.sync()
    return time.perf_counter() - started, usage.ru_maxrss * 1024


if __name__ == "__main__":
    main()
