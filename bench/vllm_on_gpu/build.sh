#!/usr/bin/env bash
# bench/vllm_on_gpu/build.sh [OUT [WORK]]: pack vLLM 0.33.0 for a bare H200 into OUT (default .vl,
# which git ignores), at most 58.5 MB, so that a small upload holds it. The machine brings Python
# 3.12, torch 2.11 (CUDA 13), triton 3.6 and transformers 5.17: vLLM's compiled parts use torch's
# stable ABI, and its Python runs with that torch although its wheel asks for a newer one. Every
# Python file is the wheel's. Needs pip, a Python 3.12 ($PY312), gcc's strip, xz and unzip; about
# five minutes of one core, 5 GB in WORK (default .vl-work).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-.vl}")
work=$(realpath -m "${2:-.vl-work}")
py=${PY312:-python3.12}
release=0.33.0
mkdir -p "$work" "$out"
cd "$work"
platforms=()
for version in 2_31 2_28 2_27 2_26 2_24 2_17; do platforms+=(--platform "manylinux_${version}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
pip() { "$py" -m pip --disable-pip-version-check "$@"; }
[ -e vllm-$release-*.whl ] || pip download -q --no-deps --only-binary=:all: "${platforms[@]}" \
    --python-version 3.12 vllm==$release -d .
rm -rf site raw so
mkdir site raw so
pip install -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --abi cp312 --abi abi3 --abi none "${platforms[@]}" --no-compile --target site \
    -r "$here/requirements.txt"
# Without what a Hopper GPU and an engine in one process never load.
unzip -q -o vllm-$release-*.whl -d raw -x 'vllm/vllm_flash_attn/_vllm_fa2_C*' 'vllm/vllm-rs' \
    '*/cutlass/include/*' '*/deep_gemm/include/*' '*.hpp' '*/deep_gemm/*.so' \
    'vllm/_deepselect_C*' 'vllm/_qutlass_C*' 'vllm/entrypoints/serve/instrumentator/static/swagger*'
for name in _C_stable_libtorch _moe_C_stable_libtorch vllm_flash_attn/_vllm_fa3_C _flashmla_C \
    _flashmla_extension_C _flashkda_C; do
    trimmed=so/$(basename $name).abi3.so
    "$py" "$here/trim_fatbin.py" raw/vllm/$name.abi3.so "$trimmed"
    cp "$trimmed" raw/vllm/$name.abi3.so
done
cp -r raw/vllm raw/vllm-$release.dist-info site/
cd site
find . -name __pycache__ -prune -exec rm -rf {} +
rm -rf bin tvm_ffi/include
find . \( -name '*.h' -o -name '*.hpp' -o -name '*.cuh' -o -name '*.cu' \) -delete
find . -name '*.pyi' -size +20k -delete
find . -name '*.so*' ! -path './vllm/*' -exec strip --strip-unneeded {} \; 2>/dev/null || true
tar cf ../py.tar --exclude='*.so' vllm vllm-$release.dist-info
tar cf ../dep.tar --exclude=./vllm --exclude=./vllm-$release.dist-info .
tar cf ../sosmall.tar vllm/_flashmla_C.abi3.so vllm/_flashmla_extension_C.abi3.so \
    vllm/_flashkda_C.abi3.so vllm/cumem_allocator.abi3.so vllm/fs_io_C.abi3.so vllm/spinloop.abi3.so
cd ..
rm -f "$out"/*.xz
for name in py dep sosmall; do xz -9e -T1 -c $name.tar >"$out/$name.tar.xz" & done
# A library's name carries its place, + for /.
for name in _C_stable_libtorch _moe_C_stable_libtorch; do
    xz -9e -T1 -c so/$name.abi3.so >"$out/vllm+$name.abi3.so.xz" &
done
xz -9e -T1 -c so/_vllm_fa3_C.abi3.so >"$out/vllm+vllm_flash_attn+_vllm_fa3_C.abi3.so.xz" &
wait
cp "$here/unpack.py" "$out/"
du -sb "$out"
