#!/usr/bin/env bash
# Makes what the machines of machine.py boot from, once, in the directory given: Debian's kernel
# (its modules hold a real verbs stack and soft-RoCE) and an initramfs whose root is this machine's.
# Needs root, apt and the network the first time, and 25 s.
set -euo pipefail
lab=$1
mkdir -p "$lab"
packages=(qemu-system-x86 busybox-static kmod cpio ibverbs-providers iproute2 zstd)
if ! dpkg -s "${packages[@]}" >/dev/null 2>&1; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
fi
if [ ! -d "$lab/kernel" ]; then
    # By its exact name: apt-get download would take every match of a pattern.
    package=$(apt-cache depends linux-image-amd64 | awk '/Depends:/{print $2; exit}')
    rm -rf "$lab/unpack"
    mkdir "$lab/unpack"
    (cd "$lab/unpack" && apt-get download -qq "$package" 2>/dev/null && dpkg-deb -x ./*.deb kernel)
    mv "$lab/unpack/kernel" "$lab/kernel"
    rm -rf "$lab/unpack"
fi
version=$(ls "$lab/kernel/lib/modules")
[ -e "$lab/kernel/lib/modules/$version/modules.dep" ] || depmod -b "$lab/kernel" "$version"

# The uncompressed kernel: the emulator boots it without firmware, and nothing has to be unpacked
# slowly inside.
if [ ! -f "$lab/vmlinux" ]; then
    python3 - "$lab/kernel/boot/vmlinuz-$version" "$lab/vmlinux" <<'PY'
import lzma
import subprocess
import sys

image = open(sys.argv[1], "rb").read()


def unpacked(magic, unpack):
    at = image.find(magic)
    while at >= 0:
        data = unpack(image[at:])
        if data[:4] == b"\x7fELF":
            return data
        at = image.find(magic, at + 1)
    return None


def xz(data):
    try:
        return lzma.LZMADecompressor().decompress(data)
    except lzma.LZMAError:
        return b""


def zstd(data):  # bytes behind the end make it fail, with the output complete
    words = ["zstd", "-dc"]
    return subprocess.run(words, input=data, capture_output=True, check=False).stdout


found = unpacked(b"\xfd7zXZ\0", xz) or unpacked(b"\x28\xb5\x2f\xfd", zstd)
if found is None:
    sys.exit("the kernel is packed in a way that is not known here")
open(sys.argv[2], "wb").write(found)
PY
fi

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir -p "$root"/{bin,proc,sys,dev,m}
cp "$(command -v busybox)" "$root/bin/"
: >"$root/modules"
for module in virtio_pci 9pnet_virtio 9p overlay; do
    modprobe -d "$lab/kernel" -S "$version" --show-depends "$module" | awk '$1=="insmod"{print $2}' |
        while read -r file; do
            inside=/m/$(basename "$file")
            grep -qxF "$inside" "$root/modules" && continue
            cp "$file" "$root/m/"
            echo "$inside" >>"$root/modules"
        done
done
cp "$(dirname "$0")/init.sh" "$root/init"
chmod +x "$root/init"
(cd "$root" && find . | cpio -o -H newc --quiet | gzip -1) >"$lab/initrd.gz"
echo "$version" >"$lab/ready"
