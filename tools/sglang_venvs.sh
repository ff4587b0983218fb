#!/usr/bin/env bash
# Makes .venv-sglang/0.5.22 and .venv-sglang/0.5.23: SGLang's real modules on a machine without a
# GPU, for tests/engines/sglang. torch, triton and what else tierd has come from the environment of
# $PYTHON (default .venv/bin/python) by a .pth file; the rest is small; torchvision is a stub. Run
# again it changes nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
base=$(realpath -s "${PYTHON:-.venv/bin/python}")
home=.venv-sglang
own=tests/engines/sglang
site() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
pip() { "$base" -m pip --disable-pip-version-check --python "$1" install -q "${@:2}"; }
stamp=$(cat "$own/requirements.txt" "$own/site/"*.py tools/sglang_venvs.sh pyproject.toml | sha256sum)

common=$home/common
if [ "$(cat $home/.ready 2>/dev/null)" != "$stamp" ]; then
    rm -f $home/.ready
    "$base" -m venv --without-pip $common
    echo "$(site "$base")" >"$(site $common/bin/python)/base.pth"
    pip $common/bin/python -r $own/requirements.txt
    cp $own/site/*.py "$(site $common/bin/python)/"
    for release in 0.5.22 0.5.23; do
        "$base" -m venv --without-pip $home/$release
        # As site directories, so that the .pth file of an editable tierd is read there.
        {
            echo "import site; site.addsitedir('$(site "$PWD/$common/bin/python")')"
            echo "import site; site.addsitedir('$(site "$base")')"
            echo "import torchvision_stub"
        } >"$(site $home/$release/bin/python)/base.pth"
        # Without its dependencies, which are CUDA libraries of several GB; a test imports a tenth.
        pip $home/$release/bin/python --no-deps --no-compile sglang==$release
    done
    echo "$stamp" >$home/.ready
fi
# tierd as the base environment has it, or, where that is none or another checkout's, anew.
if [ "$(cd / && "$base" -c 'import tierd; print(tierd.__file__)' 2>/dev/null)" != "$PWD/tierd/__init__.py" ]; then
    pip $common/bin/python --no-deps --no-build-isolation -e .
fi
touch $home/.ready
