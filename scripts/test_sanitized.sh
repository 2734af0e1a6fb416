#!/bin/sh
# Build and run the native tests under each sanitizer, then without one.
#
#   scripts/test_sanitized.sh address,undefined thread
#
# An argument is what -fsanitize= takes. The last run, without a sanitizer, is
# the whole sweep on optimized code, of which the others see fewer offsets.
set -eu
cd "$(dirname "$0")/.."

bin=.venv/bin
if ! command -v cmake >/dev/null && [ ! -x $bin/cmake ]; then
    if [ ! -x $bin/pip ]; then
        echo "test_sanitized.sh: no cmake in PATH and no $bin to install it into: install cmake, or run make setup" >&2
        exit 1
    fi
    echo "no cmake in PATH or $bin: installing cmake and ninja into $bin"
    $bin/pip install -q cmake ninja
fi
PATH=$PATH:$PWD/$bin

# Read at the first configuration of a directory only, unlike -G.
if command -v ninja >/dev/null; then export CMAKE_GENERATOR=Ninja; fi
jobs=$(nproc 2>/dev/null || echo 2)

# gcc's ThreadSanitizer does not start under some kernels' address layouts.
fixed_layout=""
if setarch "$(uname -m)" -R true 2>/dev/null; then fixed_layout="setarch $(uname -m) -R"; fi

# build_and_run DIRECTORY BUILD_TYPE SANITIZERS
build_and_run() {
    cmake -S . -B "$1" -DCMAKE_BUILD_TYPE="$2" \
        -DLONGSHORE_NATIVE_TESTS=ON -DLONGSHORE_SANITIZE="$3" >/dev/null
    cmake --build "$1" --parallel "$jobs"
    ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 $fixed_layout "$1/native_tests"
}

for sanitizers in "$@"; do
    echo "== -fsanitize=$sanitizers"
    build_and_run "build/sanitized-$sanitizers" RelWithDebInfo "$sanitizers"
done
echo "== no sanitizer"
build_and_run build/sanitized-none Release ""
echo "native tests: all passed (${*:+$* and }none)"
