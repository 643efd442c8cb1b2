#!/usr/bin/env bash
# The tests of the cuda backend, and the contract suite with it: `make test-cuda`. Arguments go to pytest.
#
# Without a GPU, kernels run in Triton's interpreter, and tests marked `gpu` are skipped. torch and triton are put into .venv
# unless they are there: the CPU build of torch, or the extra `cuda` on a machine with NVIDIA's driver.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

BIN=.venv/bin
REQUIREMENTS=tests/backends/cuda/requirements.txt
# Threads that wait do not spin: on a busy machine that is several times faster.
export OMP_WAIT_POLICY=PASSIVE

has_driver() {
  "$BIN/python" -c 'import ctypes; ctypes.CDLL("libcuda.so.1")' 2>/dev/null
}

install() {
  if "$BIN/python" -c 'import torch, triton' 2>/dev/null; then return; fi
  echo "Installing torch and triton into .venv; that takes minutes."
  if has_driver; then
    "$BIN/pip" install --quiet --disable-pip-version-check 'torch>=2.8' 'triton>=3.4'
    return
  fi
  local -a index=()
  # The CPU build is a tenth of the size. Not on PyPI: ask PyTorch's index, unless the machine's own settings know it.
  if ! "$BIN/pip" index versions torch 2>/dev/null | grep -q '+cpu'; then
    index=(--extra-index-url https://download.pytorch.org/whl/cpu)
  fi
  "$BIN/pip" install --quiet --disable-pip-version-check "${index[@]}" --requirement "$REQUIREMENTS"
}

install
exec "$BIN/pytest" tests/backends/cuda tests/contracts tests/benchmarks/test_gpu*.py "$@"
