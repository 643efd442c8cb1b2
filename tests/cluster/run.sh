#!/usr/bin/env bash
# `make test-cluster`: all tests of the cluster, also those that need Ray. Arguments go to pytest.
#
# Ray is in build/ray-venv, which sees the packages of .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

VENV=build/ray-venv
if [[ ! -e $VENV/.installed ]]; then
  rm -rf "$VENV"
  .venv/bin/python -m venv "$VENV"
  sites='import sysconfig; print(sysconfig.get_path("purelib"))'
  echo "import site; site.addsitedir('$(.venv/bin/python -c "$sites")')" >"$("$VENV/bin/python" -c "$sites")/penstock.pth"
  ray=$(.venv/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["ray"])')
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$ray"
  touch "$VENV/.installed"
fi
.venv/bin/penstock pull smollm2:135m
PENSTOCK_CHAOS_S=${CHAOS_S:-25} exec "$VENV/bin/python" -m pytest -s tests/cluster "$@"
