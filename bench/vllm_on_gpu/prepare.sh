#!/usr/bin/env bash
# bench/vllm_on_gpu/prepare.sh FOLDER [DEEP...]: on the machine with the GPU, from a checkout with FOLDER as
# build.sh made it: /tmp/site (vLLM, and tierd's own packages from wheels in FOLDER, if any), the
# tiny models (and those of the names DEEP: q4-deep, engram-deep) in /tmp/models and tierd's core in the tree. About half a minute on 16 cores.
# LIBURING_INCLUDE and LIBURING_LIBRARY name liburing where the system has none.
set -euo pipefail
folder=$(realpath "$1")
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD
(
    python3 "$folder/unpack.py" "$folder" /tmp/site
    wheels=("$folder"/*.whl)
    [ ! -e "${wheels[0]}" ] || python3 -m pip install -q --no-index --no-deps --no-compile \
        --upgrade --target /tmp/site "${wheels[@]}"
    # What an installation of tierd would tell vLLM of its plugin.
    mkdir -p /tmp/site/tierd-0.1.0.dist-info
    printf 'Metadata-Version: 2.1\nName: tierd\nVersion: 0.1.0\n' >/tmp/site/tierd-0.1.0.dist-info/METADATA
    printf '[vllm.general_plugins]\ntierd = tierd.hook.vllm:activate\n' \
        >/tmp/site/tierd-0.1.0.dist-info/entry_points.txt
    python3 -m bench.vllm_on_gpu.modelinfos /tmp/vllm-cache/modelinfos /tmp/site
    python3 -m compileall -q -j 12 /tmp/site >/dev/null 2>&1 || true
) &
unpacking=$!
(
    while [ ! -e /tmp/site/vllm/models/deepseek_v41/common/engram.py ]; do sleep 0.2; done
    sleep 1
    python3 -m bench.vllm_on_gpu.checkpoints /tmp/models /tmp/site "${@:2}"
) &
models=$!
options=()
[ -z "${LIBURING_INCLUDE:-}" ] || options=(-DLIBURING_INCLUDE="$LIBURING_INCLUDE" -DLIBURING_LIBRARY="$LIBURING_LIBRARY")
cmake -S . -B build/dev -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DPython_EXECUTABLE="$(command -v python3)" "${options[@]}" >/tmp/build.log 2>&1
cmake --build build/dev >>/tmp/build.log 2>&1 || { tail -30 /tmp/build.log; exit 1; }
cp build/dev/_native*.so tierd/io/_core/
echo "core $SECONDS s"
wait $models
echo "models $SECONDS s"
wait $unpacking
echo "site $SECONDS s"
