#!/usr/bin/env bash
# Writes locks/, the exact versions of every stack: the CPU ones from environments in which the tests passed, the GPU ones
# by resolving for Linux x86_64 with uv (pip install uv). Usage: tools/lock.sh cpu VENV | launch VENV | gpu
set -euo pipefail
cd "$(dirname "$0")/.."

frozen() {
    "$1/bin/python" -m pip --disable-pip-version-check freeze --exclude-editable --exclude setuptools --exclude wheel
}

case ${1:-} in
cpu)
    # No hashes: torch's differ between the indexes. What the CUDA build of torch brings follows torch.
    target=locks/cpu-$("$2/bin/python" -c 'import sys; print("py%d%d" % sys.version_info[:2])').txt
    {
        echo "# By tools/lock.sh cpu; tools/install.sh installs it, after torch and without requirements."
        frozen "$2" | sed 's/^torch==\([^+]*\)+.*/torch==\1/' | grep -vE '^(nvidia|cuda)-'
    } >"$target"
    ;;
launch)
    target=locks/launch.txt
    {
        echo "# By tools/lock.sh launch; tools/install_launch.sh installs it, without requirements."
        frozen "$2"
    } >"$target"
    ;;
gpu)
    target=locks/gpu-py312.txt
    # The vLLM whose CPU build the tests run.
    uv pip compile pyproject.toml --extra gpu --extra reasoning-gym --extra data --extra math --extra retrieval \
        --extra bfcl --constraint <(echo "vllm==0.32.0") --python-version 3.12 \
        --python-platform x86_64-manylinux_2_28 --generate-hashes --no-annotate --no-header --quiet >"$target"
    ;;
*)
    echo "error: expected cpu VENV, launch VENV or gpu, found '${*:-nothing}'" >&2
    exit 2
    ;;
esac
echo "$target: $(grep -c '==' "$target") packages"
