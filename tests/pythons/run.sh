#!/usr/bin/env bash
# All tests under another Python than that of .venv, or with the oldest dependencies. Arguments after the first go to pytest.
#
#   newest   `make test-python PYTHON=python3.14t`: the newest dependencies
#   oldest   `make test-floors PYTHON=python3.11`: the oldest that pyproject.toml allows, chosen by uv
#
# Each has an environment of its own in build/pythons, which is made again when pyproject.toml or the C++ code changes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

kind=$1
shift
PYTHON=${PYTHON:-python3}
name=$("$PYTHON" -c 'import sys, sysconfig; print(sysconfig.get_config_var("SOABI").split("-x86")[0].split("-aarch")[0])') || {
  echo "error: '$PYTHON' does not run. Name another one: PYTHON=python3.14t" >&2
  exit 1
}
ENV=build/pythons/$name-$kind

if [[ ! -e $ENV/.installed || -n $(find pyproject.toml CMakeLists.txt src/penstock/models/codebooks.h native -type f -newer "$ENV/.installed") ]]; then
  echo "Building Penstock for $("$PYTHON" -VV) in $ENV; the first time takes a few minutes, in which pip is silent."
  rm -rf "$ENV"
  "$PYTHON" -m venv "$ENV"
  if [[ $kind == oldest ]]; then
    "$ENV/bin/pip" install --quiet --disable-pip-version-check uv
    "$ENV/bin/uv" pip install --quiet --python "$ENV/bin/python" --resolution lowest-direct --editable '.[test]'
  else
    "$ENV/bin/pip" install --quiet --disable-pip-version-check --only-binary :all: --editable '.[test]'
  fi
  touch "$ENV/.installed"
fi
"$ENV/bin/penstock" pull smollm2:135m
exec "$ENV/bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
