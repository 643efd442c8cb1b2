#!/usr/bin/env bash
# The threads of a step under GCC's ThreadSanitizer: `make test-races`. Arguments go to pytest; a race ends the run.
#
# Penstock is built once more, in a folder of its own. Python itself is not: the sanitizer's library is loaded before it, and
# without `site`, whose hook for the editable build would bring that one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

BUILD=build/sanitized
TESTS=(tests/backends/test_native_team.py tests/backends/test_turns.py
  tests/backends/test_native_strands.py::test_many_threads_answer_as_one_does)

.venv/bin/pip install --quiet --disable-pip-version-check . --no-deps --upgrade --target "$BUILD/site" \
  -C build-dir="$BUILD/cmake" -C install.strip=false -C cmake.define.PENSTOCK_SANITIZE=thread
packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# Attention reads whole tiles of 16 positions, and overwrites the scores of those that a query does not see. Another strand may be
# writing their keys meanwhile: tests with NaN in all that nobody has written (`poison`) see to it that nothing comes of them.
printf 'race:kv_write_rows\nrace:::attention(\n' > "$BUILD/suppressions"
# `halt_on_error`: pytest would go on. `setarch -R`: the sanitizer wants fixed addresses.
export TSAN_OPTIONS="halt_on_error=1 suppressions=$PWD/$BUILD/suppressions ${TSAN_OPTIONS:-}" PYTHONPATH="$BUILD/site:$packages"
exec setarch -R env LD_PRELOAD="$("${CXX:-c++}" -print-file-name=libtsan.so)" \
  .venv/bin/python -S -m pytest -p no:cacheprovider -p no:xdist --capture=sys -x "${TESTS[@]}" "$@"
