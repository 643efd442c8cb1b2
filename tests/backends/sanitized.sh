#!/usr/bin/env bash
# The native module under GCC's sanitizers; an error ends the run. Arguments after the first go to pytest.
#
#   races     threads of a step, by ThreadSanitizer: `make test-races`
#   memory    kernels of every variant that this machine can run or emulate, by AddressSanitizer and UndefinedBehaviorSanitizer, a file of
#             tests for each core: `make test-sanitize`
#
# No report is suppressed. What is not looked at stands in the code, with its reason: `no_sanitize`, and `PENSTOCK_TILE_READER`,
# where the sanitizer is told of what attention sees instead.
#
# Penstock is built once more, in a folder of its own. Python itself is not: the sanitizer's library is loaded before it, and
# without `site`, whose hook for the editable build would bring that one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

kind=$1
shift
BUILD=build/sanitized/$kind
case $kind in
  races)
    sanitizers=thread libraries=(libtsan.so)
    # Engines that share a team; strands, and threads that share one, also with portable kernels, as masked stores are not seen;
    # sleepers; steps that wait for masks; products of experts and adapters; texts; states.
    TESTS=(tests/backends/test_native_team.py
      tests/backends/test_turns.py::test_no_thread_is_forgotten_and_the_times_add_up
      tests/backends/test_native_strands.py::test_an_answer_of_portable_kernels_does_not_either
      "tests/backends/test_native_strands.py::test_many_threads_answer_as_one_does[3]"
      tests/backends/test_native_strands.py::test_threads_that_take_no_part_in_a_step_sleep_on
      tests/backends/test_native_experts.py::test_a_row_is_the_same_to_the_bit_whatever_rows_come_with_it
      tests/backends/test_native_adapter_bits.py::test_a_row_alone_is_the_row_among_others
      tests/backends/test_native_texts.py::test_a_texts_bits_are_the_same_alone_and_beside_others
      tests/backends/test_paged_state.py::test_threads_change_no_bit
      tests/backends/test_latent_attention.py::test_answers_do_not_depend_on_chunks_batches_or_threads)
    processes=1
    ;;
  memory)
    sanitizers=address,undefined libraries=(libasan.so libstdc++.so)  # the latter, for the former to find who throws
    TESTS=(tests/contracts tests/backends/test_native_{kernels,formats,adapter_bits,experts,heads,row8,limits,texts,fetching,logits}.py
      tests/backends/test_{tiles,adapters,recurrent_state,paged_state,latent_attention}.py)  # those that take long first; strands are races'
    set -- -k "not reference and not hash" "$@"
    processes=$(nproc)
    ;;
  *)
    echo "usage: ${BASH_SOURCE[0]} races|memory [pytest's arguments]" >&2
    exit 2
    ;;
esac

.venv/bin/pip install --quiet --disable-pip-version-check . --no-deps --upgrade --target "$BUILD/site" \
  -C build-dir="$BUILD/cmake" -C install.strip=false -C cmake.define.PENSTOCK_SANITIZE=$sanitizers
packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# `halt_on_error`: pytest would go on. `setarch -R`: the sanitizer wants fixed addresses. Python frees little when it ends.
export TSAN_OPTIONS="halt_on_error=1 ${TSAN_OPTIONS:-}"
export ASAN_OPTIONS="detect_leaks=0 ${ASAN_OPTIONS:-}" UBSAN_OPTIONS="halt_on_error=1 print_stacktrace=1 ${UBSAN_OPTIONS:-}"
export PYTHONPATH="$PWD/$BUILD/site:$packages" PYTHONMALLOC=malloc
preload=$(for library in "${libraries[@]}"; do "${CXX:-c++}" -print-file-name="$library"; done | paste -sd:)
pytest() {
  local code=0
  setarch -R env LD_PRELOAD="$preload" .venv/bin/python -S -m pytest -p no:cacheprovider -p no:xdist --capture=sys --timeout 1200 -x "$@" || code=$?
  ((code == 0 || code == 5)) || return 255  # 5: none was asked for in that file. 255 ends all
}
export -f pytest
export preload
printf '%s\n' "${TESTS[@]}" | xargs -I {} -P "$processes" bash -c 'pytest "$@"' pytest {} "$@"
