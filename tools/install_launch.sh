#!/usr/bin/env bash
# Makes the environment of `trace-megatron launch`: NeMo-Run and what the command line needs, no torch. It is one of its
# own because NeMo-Run's requirements conflict with vLLM's (docs/launch.md). Usage: tools/install_launch.sh [VENV]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv-launch}
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check -q)

echo "installing into $venv (a minute the first time) ..." >&2
"${pip[@]}" install "setuptools==78.1.1"
if [ "$("$venv/bin/python" -c 'import sys; print(sys.version_info[:2], sys.platform)')" = "(3, 11) linux" ] && [ -z "${TRACE_RESOLVE:-}" ]; then
    "${pip[@]}" install --no-deps -r locks/launch.txt
else
    "${pip[@]}" install "nemo-run==0.11.1" "leptonai<0.47" typer pyyaml rich
fi
# Without the requirements of training, which this environment never imports.
TRACE_BUILD=none "${pip[@]}" install --no-build-isolation --no-deps -e .
