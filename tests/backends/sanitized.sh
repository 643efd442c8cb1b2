#!/usr/bin/env bash
# The threads of a step under GCC's ThreadSanitizer: `make test-races`. Arguments go to pytest; a race ends the run.
#
# No report is suppressed. What is not looked at stands in the code, with its reason: `no_sanitize`, and `PENSTOCK_TILE_READER`,
# where the sanitizer is told of what attention sees instead.
#
# Penstock is built once more, in a folder of its own. Python itself is not: the sanitizer's library is loaded before it, and
# without `site`, whose hook for the editable build would bring that one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

BUILD=build/sanitized
# Engines that share a team; strands, and threads that share one, also with portable kernels, as masked stores are not seen;
# sleepers; products of experts and adapters; texts.
TESTS=(tests/backends/test_native_team.py
  tests/backends/test_turns.py::test_no_thread_is_forgotten_and_the_times_add_up
  tests/backends/test_native_strands.py::test_an_answer_of_portable_kernels_does_not_either
  "tests/backends/test_native_strands.py::test_many_threads_answer_as_one_does[3]"
  tests/backends/test_native_strands.py::test_threads_that_take_no_part_in_a_step_sleep_on
  tests/backends/test_native_experts.py::test_a_row_is_the_same_to_the_bit_whatever_rows_come_with_it
  tests/backends/test_native_adapter_bits.py::test_a_row_alone_is_the_row_among_others
  tests/backends/test_native_texts.py::test_a_texts_bits_are_the_same_alone_and_beside_others)

.venv/bin/pip install --quiet --disable-pip-version-check . --no-deps --upgrade --target "$BUILD/site" \
  -C build-dir="$BUILD/cmake" -C install.strip=false -C cmake.define.PENSTOCK_SANITIZE=thread
packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# `halt_on_error`: pytest would go on. `setarch -R`: the sanitizer wants fixed addresses.
export TSAN_OPTIONS="halt_on_error=1 ${TSAN_OPTIONS:-}" PYTHONPATH="$BUILD/site:$packages"
exec setarch -R env LD_PRELOAD="$("${CXX:-c++}" -print-file-name=libtsan.so)" \
  .venv/bin/python -S -m pytest -p no:cacheprovider -p no:xdist --capture=sys -x "${TESTS[@]}" "$@"
