#!/usr/bin/env bash
# Compiles the native kernels for 64-bit Arm and runs tests/native/agree.cpp under an emulator of three processors: with the
# matrix product of bytes, with no more than their dot product, and with neither. Each must offer the instruction sets it
# has, and those agree. Debian: apt-get install g++-aarch64-linux-gnu qemu-user
#
#   tools/cross.sh [ROUNDS]
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-6}
for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
    command -v "$tool" >/dev/null || { echo "$tool is not here: apt-get install g++-aarch64-linux-gnu qemu-user" >&2; exit 3; }
done
cmake=$(command -v .venv/bin/cmake || command -v cmake)
build=build/aarch64
mkdir -p build
"$cmake" -S kernels/quantkit_kernels/cpu -B "$build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_SYSTEM_NAME=Linux \
    -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DQK_AGREE=ON >"$build.log" 2>&1 ||
    { cat "$build.log" >&2; exit 1; }
"$cmake" --build "$build" --parallel >>"$build.log" 2>&1 || { cat "$build.log" >&2; exit 1; }
portable=1 neon=64 dotprod=128 i8mm=256  # IsaBit of isa.h
for at in "max $((portable + neon + dotprod + i8mm))" "neoverse-n1 $((portable + neon + dotprod))" "cortex-a53 $((portable + neon))"; do
    read -r processor mask <<<"$at"
    echo "$processor:"
    qemu-aarch64 -cpu "$processor" -L /usr/aarch64-linux-gnu "$build/quantkit_cpu_agree" "$rounds" "$mask"
done
