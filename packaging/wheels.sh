#!/usr/bin/env bash
# Builds wheels for Linux into dist/: `make wheels`, `make wheels ARCH=aarch64`. They run with glibc 2.28 or later, and have
# libstdc++ inside. docs/how-to/release.md says what else they contain and how to build the same bytes again.
#
# This machine's GCC compiles against the C library of Debian 11 (glibc 2.31), which is unpacked into build/wheels. For symbols
# newer than glibc 2.28, packaging/glibc_2_28.cpp has replacements; auditwheel finds any that are left, and that is an error.
#
#   PYTHONS="..."   the interpreters to build with. The default has one for each wheel: python3.11 for 3.11, python3.12 for every
#                   later one (stable ABI), python3.14t for 3.14 without the GIL. The last line names those that were missing
#
# Needs GCC 12 or later (`g++`; for the other architecture `g++-aarch64-linux-gnu`), `mmdebstrap`, and `make install-locked`.
# No root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

ARCH=${ARCH:-$(uname -m)}
PYTHONS=${PYTHONS:-python3.11 python3.12 python3.14t}
RELEASE=bullseye
LOCK=packaging/requirements-dev.lock
BUILD=$PWD/build/wheels/$ARCH
SYSROOT=$BUILD/$RELEASE
TRIPLE=$ARCH-linux-gnu
CXX=$TRIPLE-g++
export PATH=$PWD/.venv/bin:$PATH

case $ARCH in
  x86_64) debian=amd64 ;;
  aarch64) debian=arm64 ;;
  *) echo "error: no wheel is built for ARCH=$ARCH. Use x86_64 or aarch64." >&2; exit 1 ;;
esac
for tool in "$CXX" mmdebstrap uv auditwheel; do
  command -v "$tool" >/dev/null || {
    echo "error: $tool is missing. The head of packaging/wheels.sh says what installs it." >&2
    exit 1
  }
done

if [[ ! -e $SYSROOT/.complete ]]; then
  rm -rf "$SYSROOT"
  mkdir -p "$SYSROOT"
  # Through tar, since a folder that mmdebstrap writes belongs to another user, unless root runs it.
  mmdebstrap --quiet --variant=extract --arch=$debian --include=libc6-dev \
    --setup-hook="sed -i /$RELEASE-/d \"\$1/etc/apt/sources.list\"" $RELEASE - |
    tar -x -C "$SYSROOT" --exclude='./dev/*'
  # Absolute links would lead to this machine's files.
  find "$SYSROOT" -type l -lname '/*' -printf '%p %l\n' | while read -r link target; do ln -sfn "$SYSROOT$target" "$link"; done
  touch "$SYSROOT/.complete"
fi

# Only the compiler's own headers are this machine's. libgcc's unwinder is the system's: this machine's would need glibc 2.35.
version=$("$CXX" -dumpversion)
libstdcxx=/usr/include/c++/$version:/usr/include/$TRIPLE/c++/$version
if [[ ! -d /usr/include/$TRIPLE/c++/$version ]]; then # Debian's cross-compiler
  libstdcxx=/usr/$TRIPLE/include/c++/$version:/usr/$TRIPLE/include/c++/$version/$TRIPLE
fi
headers=$libstdcxx:$("$CXX" -print-file-name=include):$SYSROOT/usr/include/$TRIPLE:$SYSROOT/usr/include
system="--sysroot=$SYSROOT -nostdinc -nostdinc++ -isystem ${headers//:/ -isystem }"
# shellcheck disable=SC2086 # words
"$CXX" $system -O2 -fPIC -fno-builtin -c packaging/glibc_2_28.cpp -o "$BUILD/glibc_2_28.o"
export CXX
export CXXFLAGS="$system -ffile-prefix-map=$PWD=."
export LDFLAGS="-B$SYSROOT/usr/lib/$TRIPLE -L$SYSROOT/usr/lib/$TRIPLE -L$SYSROOT/lib/$TRIPLE -static-libstdc++"
LDFLAGS+=" $BUILD/glibc_2_28.o -Wl,--gc-sections,--version-script=$PWD/packaging/wheels.map"
if [[ $ARCH != "$(uname -m)" ]]; then
  export CMAKE_ARGS="-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$ARCH"
fi
export _PYTHON_HOST_PLATFORM=linux-$ARCH
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH

built=()
absent=()
for python in $PYTHONS; do
  path=$("$python" -c 'import sys; print(sys.executable)' 2>/dev/null) || { # a version manager's command may have none to run
    absent+=("$python")
    continue
  }
  # aarch64's interpreter is not here: its headers are the same, and its modules are named after it.
  suffix=$("$path" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
  export SETUPTOOLS_EXT_SUFFIX=${suffix/-$(uname -m)-/-$ARCH-}
  rm -rf "$BUILD/cmake" "$BUILD/raw"
  .venv/bin/python packaging/sbom.py "$CXX" >"$BUILD/penstock.cdx.json"
  uv build --wheel --python "$path" --build-constraints "$LOCK" --require-hashes --out-dir "$BUILD/raw" \
    -C build-dir="$BUILD/cmake" -C cmake.define.PENSTOCK_SBOM="$BUILD/penstock.cdx.json"
  # auditwheel looks at versioned symbols alone. One without a version is Python's, or missing from the C library.
  symbols=$(find "$BUILD/cmake" -name '*.so' -exec "$TRIPLE-nm" -D --undefined-only {} +)
  missing=$(grep ' U ' <<<"$symbols" | grep -v '@\| U _\?Py' || true)
  [[ -z $missing ]] || { echo "error: the C library of $RELEASE does not have: $missing" >&2; exit 1; }
  rm -rf "$BUILD/tagged"
  auditwheel repair --plat auto --wheel-dir "$BUILD/tagged" "$BUILD"/raw/*.whl
  wheel=$(basename "$BUILD"/tagged/*.whl)
  if ! [[ $wheel =~ manylinux_2_([0-9]+) ]] || ((BASH_REMATCH[1] > 28)); then
    echo "error: $wheel needs more than glibc 2.28." >&2
    exit 1
  fi
  mkdir -p dist
  mv "$BUILD/tagged/$wheel" dist
  built+=("dist/$wheel")
done
[[ -z $(git status --porcelain) ]] || echo "note: built with changes that are not committed." >&2
((${#built[@]} == 0)) || sha256sum "${built[@]}"
((${#absent[@]} == 0)) || echo "note: not built, because the interpreter is missing here: ${absent[*]}" >&2
((${#built[@]}))
