#!/usr/bin/env bash
# Builds the image and checks in containers what docs/how-to/deploy.md says of it: `make test-image`.
#
#   ENGINE=docker   another engine than podman
#   BASE=debian     makes the base images here from Debian's packages (mmdebstrap, as root) and takes wheels from pip's index.
#                   This is also what happens if the registry that has python:3.13 is not reached
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

ENGINE=${ENGINE:-podman}
PYTHON_VERSION=3.13
OFFICIAL=docker.io/library/python
MADE=localhost/penstock-base
SUITE=trixie  # whose Python is PYTHON_VERSION
WORK=build/image
mkdir -p "$WORK"

fail() { echo "error: $*" >&2; exit 1; }
command -v "$ENGINE" >/dev/null || fail "$ENGINE is missing (Debian: apt install podman, or set ENGINE=docker)."
has() { "$ENGINE" image inspect "$1" >/dev/null 2>&1; }

# make_base TAG PACKAGES: an image with what the official one has, at the same places, and with nothing else.
make_base() {
  has "$MADE:$1" && return
  command -v mmdebstrap >/dev/null || fail "the registry is not reached, and mmdebstrap is missing (apt install mmdebstrap)."
  local root; root=$(mktemp -d)
  mmdebstrap --quiet --variant=minbase --include="ca-certificates,netbase,tzdata,$2" \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' "$SUITE" "$root"
  rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/*
  find "$root" -name '*.pyc' -delete  # the official image has none
  ln -s /usr/bin/python3 "$root/usr/local/bin/python"
  tar -C "$root" -c . | "$ENGINE" import - "$MADE:$1" >/dev/null
  rm -rf "$root"
}

# fetch_wheels: what the build needs, for the Python of the image.
fetch_wheels() {
  local platforms=() minor
  for minor in $(seq 12 41); do platforms+=(--platform "manylinux_2_${minor}_$(uname -m)"); done
  .venv/bin/python - > "$WORK/requirements.txt" <<'EOF'
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))
print(*project["project"]["dependencies"], *project["build-system"]["requires"], "cmake", "ninja", sep="\n")
EOF
  .venv/bin/pip download --quiet --disable-pip-version-check --dest packaging/wheels --only-binary :all: \
    --python-version "$PYTHON_VERSION" "${platforms[@]}" --platform "manylinux2014_$(uname -m)" -r "$WORK/requirements.txt"
}

arguments=(--build-arg "PYTHON=$PYTHON_VERSION")
if [[ ${BASE:-} != debian ]] && { has "$OFFICIAL:$PYTHON_VERSION-slim" || "$ENGINE" pull --quiet "$OFFICIAL:$PYTHON_VERSION-slim"; }; then
  base=$OFFICIAL
else
  base=$MADE
  make_base "$PYTHON_VERSION-slim" python3
  make_base "$PYTHON_VERSION" python3-dev,python3-venv,python3-pip,g++,make
  fetch_wheels
  arguments+=(--build-arg "BASE=$base" --network=none --build-arg "PIP_OPTIONS=--no-index --find-links packaging/wheels")
fi

# Limits of open files and of processes that root may set without the capability, and a runtime that knows control groups of
# both versions at once: some machines need them.
probe() { "$ENGINE" run --rm --network=none "$base:$PYTHON_VERSION-slim" true; }
if [[ $ENGINE == podman ]] && ! refusal=$(probe 2>&1); then
  files=$(ulimit -Hn)
  printf '[containers]\ndefault_ulimits = ["nofile=%s:%s", "nproc=4096:4096"]\n[engine]\nruntime = "%s"\n' \
    "$files" "$files" "$(command -v runc >/dev/null && echo runc || echo crun)" > "$WORK/containers.conf"
  export CONTAINERS_CONF=$PWD/$WORK/containers.conf
  probe || fail "podman runs no container here."
  echo "note: podman runs with $WORK/containers.conf. Without it: ${refusal##*Error: }"
fi

echo "base: $base:$PYTHON_VERSION and $base:$PYTHON_VERSION-slim$([[ $base == "$MADE" ]] && echo ", made here of Debian $SUITE's packages, since the registry was not used")"
[[ $ENGINE != podman ]] || arguments+=(--format docker)
"$ENGINE" build "${arguments[@]}" --tag localhost/penstock:test --file packaging/Containerfile .
.venv/bin/penstock pull smollm2:135m
PENSTOCK_ENGINE=$ENGINE PENSTOCK_IMAGE=localhost/penstock:test exec .venv/bin/pytest -s -p no:cacheprovider tests/image "$@"
