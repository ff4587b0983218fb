#!/usr/bin/env bash
# Writes the core's type stubs into the tree; --check says whether they are what the core says.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
.venv/bin/python -m nanobind.stubgen -q -r -m tierd.io._core._native -O "$out"
if [ "${1:-}" = --check ]; then
    diff -ru tierd/io/_core/_native "$out/_native" || { echo "stubs are stale; run: make stubs" >&2; exit 1; }
else
    rm -rf tierd/io/_core/_native
    cp -r "$out/_native" tierd/io/_core/_native
fi
