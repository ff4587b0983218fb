#!/usr/bin/env bash
# Builds the native tests twice, with AddressSanitizer + UndefinedBehaviorSanitizer and with
# ThreadSanitizer, and runs them. Usage: tools/sanitizers.sh [ctest arguments, such as -R pump]
set -eu
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"  # cmake and ninja of `make setup`

# ThreadSanitizer's runtime cannot place its shadow when the kernel spreads mappings over more than
# 28 bits (vm.mmap_rnd_bits on new kernels). Without address randomisation it always can.
fixed_addresses=()
if setarch "$(uname -m)" -R true 2>/dev/null; then
    fixed_addresses=(setarch "$(uname -m)" -R)
elif [ "$(cat /proc/sys/vm/mmap_rnd_bits 2>/dev/null || echo 28)" -gt 28 ]; then
    echo "ThreadSanitizer may not start here; run: sysctl vm.mmap_rnd_bits=28" >&2
fi

generator=()
if command -v ninja >/dev/null; then generator=(-G Ninja); fi

check() { # name, sanitizers, compiler flags
    local dir="build/$1"
    mkdir -p "$dir"
    cmake -S . -B "$dir" "${generator[@]}" -DTIERD_PYTHON=OFF -DTIERD_NATIVE_TESTS=ON \
        -DTIERD_SANITIZE="$2" -DCMAKE_CXX_FLAGS="$3" >"$dir/configure.log" 2>&1 ||
        { cat "$dir/configure.log"; exit 1; }
    cmake --build "$dir" --parallel "$(nproc)" >"$dir/build.log" 2>&1 || { cat "$dir/build.log"; exit 1; }
    echo "== $2"
    "${fixed_addresses[@]}" ctest --test-dir "$dir" --output-on-failure --timeout 180 "${@:4}"
}

export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
check asan address,undefined "" "$@"
# gcc warns that ThreadSanitizer does not model fences. Ours only order a flag against another; what
# the flags guard is published with release stores and read with acquire loads.
check tsan thread -Wno-tsan "$@"
