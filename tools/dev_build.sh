#!/usr/bin/env bash
# Builds the core into the source tree, for work in a checkout that is not installed.
set -eu
cd "$(dirname "$0")/.."
python=$(realpath -s "${PYTHON:-.venv/bin/python}")
mkdir -p build
cmake -S . -B build/dev -G Ninja -DPython_EXECUTABLE="$python" -DCMAKE_BUILD_TYPE=Release >build/dev.log 2>&1 ||
    { cat build/dev.log; exit 1; }
cmake --build build/dev
# Not in place: processes may have the last one mapped.
for so in build/dev/_native*.so; do
    cp "$so" "tierd/io/_core/.$(basename "$so")" && mv "tierd/io/_core/.$(basename "$so")" "tierd/io/_core/$(basename "$so")"
done
