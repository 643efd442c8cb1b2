#!/usr/bin/env bash
# The kernels of 64-bit Arm on an x86-64 machine: `make test-arm`. Cross-builds Penstock, and lets QEMU run it.
#
#   run.sh [tests] [...]    tests of kernels, contracts and small models on each of CPUS; arguments go to pytest
#   run.sh answers [...]    greedy answers of the default model beside those of this machine's avx512 kernels; arguments go to
#                           `answers.py record`: --prompts 10 --tokens 4 for fewer
#   run.sh python [...]     Python of the emulated machine, with Penstock
#
#   CPUS="max ..."          QEMU's CPUs. By default max, which has all variants; then neoverse-n1 (without i8mm) and cortex-a72
#                           (without dot products), on which only the tests of the choice run: it is all that they change
#
# Needs Debian 12 or later, `make install`, and `apt install g++-aarch64-linux-gnu qemu-user-static mmdebstrap`; no root.
# All goes into build/arm: a Debian for arm64 with Python (unpacked, 130 MB), wheels (250 MB), the module. That takes some three
# minutes of two cores, the 3,700 tests less than 40, and the 100 answers 9.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

ARM=$PWD/build/arm
ROOT=$ARM/root
PYTHON=$ARM/venv/bin/python3
CPUS=${CPUS:-max neoverse-n1 cortex-a72}
TESTS=(tests/backends/test_native_{kernels,formats,row8,texts,experts,adapter_bits,heads,fetching,logits}.py
  tests/backends/test_{choice,recurrent_state,paged_state,latent_attention}.py tests/contracts
  tests/parity/test_{tiny,encoders,adapters}.py tests/test_machine.py)
# Contracts of the reference backend, and many settings on it, take hours here and show nothing of Arm.
COMPILED="not ((contracts or parity) and (reference or setting))"

# Of the same release as this machine: the module is linked with the libraries of the cross-compiler.
make_root() {
  if [[ ! -x $ROOT/usr/bin/python3 ]]; then
    rm -rf "$ROOT"
    mkdir -p "$ROOT"
    # Through tar, since a folder that mmdebstrap writes belongs to another user, unless root runs it.
    mmdebstrap --quiet --variant=extract --arch=arm64 --include=python3,libpython3-dev,libstdc++6 \
      "$(. /etc/os-release && echo "$VERSION_CODENAME")" - | tar -x -C "$ROOT" --exclude='./dev/*'
  fi
  NAME=$(basename "$(readlink "$ROOT/usr/bin/python3")") # python3.11
  SITE=$ARM/venv/lib/$NAME/site-packages
}

# An environment whose interpreter is a script of this machine: what the tests start is emulated, too, and the kernel need not know.
make_environment() {
  mkdir -p "$ARM/venv/bin" "$SITE"
  printf '#!/bin/sh\nexec qemu-aarch64-static -L %s -0 "$0" %s "$@"\n' "$ROOT" "$ROOT/usr/bin/$NAME" >"$PYTHON"
  chmod +x "$PYTHON"
  printf 'home = %s\ninclude-system-site-packages = false\n' "$ROOT/usr/bin" >"$ARM/venv/pyvenv.cfg"
}

install_wheels() {
  local required=$ARM/requirements.txt glibc minor
  local -a platforms=(--platform manylinux2014_aarch64)
  .venv/bin/python -c '
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
others = ("penstock", "openai", "import-linter", "ruff", "mypy")
print(*project["dependencies"], *(r for r in project["optional-dependencies"]["test"] if not r.startswith(others)), sep="\n")
' >"$required"
  if cmp -s "$required" "$SITE/requirements.txt"; then return; fi
  glibc=$("$PYTHON" -c 'import os; print(os.confstr("CS_GNU_LIBC_VERSION").rpartition(".")[2])')
  for ((minor = 17; minor <= glibc; ++minor)); do platforms+=(--platform "manylinux_2_${minor}_aarch64"); done
  .venv/bin/pip install --quiet --disable-pip-version-check --target "$SITE" --upgrade --requirement "$required" \
    "${platforms[@]}" --python-version "${NAME#python}" --only-binary=:all:
  cp "$required" "$SITE/requirements.txt"
}

# The wheel is named after this machine, so that its pip installs it; only the modules' suffix is Arm's.
build() {
  local suffix
  suffix=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
  SETUPTOOLS_EXT_SUFFIX=$suffix .venv/bin/pip install --quiet --disable-pip-version-check . --no-deps --upgrade --target "$SITE" \
    -C build-dir="$ARM/cmake" -C cmake.define.CMAKE_TOOLCHAIN_FILE="$PWD/tests/arm/toolchain.cmake" \
    -C cmake.define.CMAKE_SYSROOT="$ROOT" -C cmake.define.Python_INCLUDE_DIR="$ROOT/usr/include/$NAME"
}

# Files go to as many processes as there are cores.
run_tests() {
  local cpu
  for cpu in $CPUS; do
    echo "== QEMU's $cpu: $(QEMU_CPU=$cpu "$PYTHON" -c 'from penstock.backends.native import info; print(*info()["variants"])')"
    if [[ $cpu == max ]]; then
      QEMU_CPU=$cpu "$PYTHON" -m pytest -q -p no:cacheprovider -n "$(nproc)" --dist loadfile --no-loadscope-reorder \
        --timeout 3000 -k "$COMPILED" "${TESTS[@]}" "$@"
    else
      QEMU_CPU=$cpu "$PYTHON" -m pytest -q -p no:cacheprovider --timeout 3000 tests/backends/test_choice.py "$@"
    fi
  done
}

compare_answers() {
  QEMU_CPU=max "$PYTHON" tests/arm/answers.py record "$ARM/neon-i8mm.json" --kernels neon-i8mm "$@"
  .venv/bin/python tests/arm/answers.py record "$ARM/avx512.json" --kernels avx512 "$@"
  .venv/bin/python tests/arm/answers.py compare "$ARM/neon-i8mm.json" "$ARM/avx512.json"
}

what=tests
if [[ ${1:-} =~ ^(tests|answers|python)$ ]]; then
  what=$1
  shift
fi
make_root
make_environment
install_wheels
build
case $what in
  tests) run_tests "$@" ;;
  answers) compare_answers "$@" ;;
  python) exec "$PYTHON" "$@" ;;
esac
