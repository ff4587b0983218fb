#!/usr/bin/env bash
# Makes .venv and installs what is missing: Debian packages when root (else it prints the command
# and stops), then the Python packages of pyproject.toml. Run again it changes nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=()
command -v g++ >/dev/null || packages+=(g++)
command -v fio >/dev/null || packages+=(fio)
command -v git >/dev/null || packages+=(git)
[ -e /usr/include/liburing.h ] || packages+=(liburing-dev)
[ -e /usr/include/infiniband/verbs.h ] || packages+=(libibverbs-dev)
python=${PYTHON:-python3}
command -v "$python" >/dev/null || packages+=(python3 python3-venv python3-dev)
if command -v "$python" >/dev/null; then
    "$python" -c 'import ensurepip, venv' 2>/dev/null || packages+=(python3-venv)
    "$python" - <<'PY' || packages+=(python3-dev)
import pathlib, sys, sysconfig
sys.exit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists())
PY
fi
if [ ${#packages[@]} -gt 0 ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "setup: installing ${packages[*]}"
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq
        apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
    else
        echo "setup: Debian packages are missing; run: sudo apt-get install -y ${packages[*]}" >&2
        exit 1
    fi
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup: $python is older than 3.11; run: PYTHON=/path/to/python3.11 make setup" >&2
    exit 1
}

[ -x .venv/bin/python ] || "$python" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check install -q -c tools/constraints.txt "$@"; }
# The build runs in this environment (no isolation), so that a rebuild costs seconds.
pip --upgrade pip
pip scikit-build-core nanobind cmake ninja
# torch first and pinned: asked for through a range, pip would take the newest CUDA build.
pip torch
pip --no-build-isolation -e '.[hf,gpu,plots,test]'
