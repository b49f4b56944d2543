#!/usr/bin/env bash
# Builds csrc/stress with AddressSanitizer and UndefinedBehaviorSanitizer, then with ThreadSanitizer, and runs both.
# Needs a C++20 compiler with its sanitizers, nothing else. Usage: tools/sanitize_ops.sh [ROUNDS]
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-60}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
flags=(-std=c++20 -O1 -g -ffp-contract=fast -fno-math-errno -fno-omit-frame-pointer -Wno-psabi -pthread)

for sanitizer in address,undefined thread; do
    echo "-fsanitize=$sanitizer: building ..."
    "${CXX:-c++}" "${flags[@]}" -fsanitize=$sanitizer -fno-sanitize-recover=all csrc/stress/*.cpp csrc/cpu/*.cpp -o "$scratch/stress"
    "$scratch/stress" "$rounds"
done
