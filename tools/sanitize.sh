#!/usr/bin/env bash
# Builds the native kernels under AddressSanitizer with UndefinedBehaviorSanitizer, then under ThreadSanitizer, and runs
# tests/native/agree.cpp in each: random shapes, every instruction set of this machine, several teams and callers at once.
#
#   tools/sanitize.sh [ROUNDS]
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-12}
mkdir -p build
cmake=$(command -v .venv/bin/cmake || command -v cmake)
export ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1

for kind in address,undefined thread; do
    build=build/sanitize-${kind%%,*}
    "$cmake" -S kernels/quantkit_kernels/cpu -B "$build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE="-O1 -DNDEBUG" \
        -DQK_SANITIZE="$kind" -DQK_AGREE=ON >"$build.log" 2>&1 || { cat "$build.log" >&2; exit 1; }
    "$cmake" --build "$build" --parallel >>"$build.log" 2>&1 || { cat "$build.log" >&2; exit 1; }
    echo "$kind:"
    "$build/quantkit_cpu_agree" "$rounds"
done
