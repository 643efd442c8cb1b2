#!/usr/bin/env bash
# Schemas against jsonschema, and against JSON-Schema-Test-Suite, which is in its source package: `make test-schemas`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

CACHE=build/schemas
VERSION=4.26.0

if [[ ! -f $CACHE/.fetched ]]; then
  mkdir -p "$CACHE"
  .venv/bin/pip download --quiet --disable-pip-version-check --no-deps --no-binary jsonschema --dest "$CACHE" "jsonschema==$VERSION"
  tar -xzf "$CACHE/jsonschema-$VERSION.tar.gz" -C "$CACHE"
  .venv/bin/pip install --quiet --disable-pip-version-check --target "$CACHE/packages" "jsonschema[format]==$VERSION"
  touch "$CACHE/.fetched"
fi
PYTHONPATH=$CACHE/packages:src:tests exec .venv/bin/python tests/schemas/check.py "$CACHE/jsonschema-$VERSION/json/tests" "$@"
