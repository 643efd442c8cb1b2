#!/usr/bin/env bash
# Makes build/parity-venv, with torch and transformers as tests/parity/requirements.txt has them, unless it is there.
#
#   PYTHON=...       interpreter to make it with (default .venv/bin/python)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=${PYTHON:-.venv/bin/python}
VENV=build/parity-venv
REQUIREMENTS=tests/parity/requirements.txt

if cmp -s "$REQUIREMENTS" "$VENV/installed-requirements.txt"; then exit; fi
echo "Making $VENV with torch and transformers; the first time takes minutes."
rm -rf "$VENV"
"$PYTHON" -m venv "$VENV"
index=()
# All of pip's answer is read first: under pipefail, a grep that ends early makes the pipe fail.
versions=$("$VENV/bin/pip" index versions torch 2>/dev/null || true)
# The CPU build is a tenth of the size. Not on PyPI: ask PyTorch's index, unless the machine's own settings know it.
if [[ $versions != *+cpu* ]]; then
  index=(--extra-index-url https://download.pytorch.org/whl/cpu)
fi
"$VENV/bin/pip" install --quiet --disable-pip-version-check "${index[@]}" --requirement "$REQUIREMENTS"
cp "$REQUIREMENTS" "$VENV/installed-requirements.txt"
