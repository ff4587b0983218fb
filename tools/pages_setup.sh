#!/usr/bin/env bash
# What `make pages` needs beyond `make setup`: the Python packages of the `pages` extra and Debian's
# Chromium. Without a way to get Chromium its tests skip, and say so.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/python -m pip --disable-pip-version-check install -q -c tools/constraints.txt \
    'playwright>=1.58,<2' 'mkdocs-material>=9.7,<10'
command -v chromium >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq || true
    apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null && exit 0
fi
echo "pages: NO CHROMIUM, so the dashboard's tests will skip; run: sudo apt-get install -y chromium" >&2
