#!/usr/bin/env bash
# Build what is published and check it: a source distribution, from it a wheel for the stable ABI (Python 3.12 and
# newer) and one for this Python where it is older, with manylinux tags and valid metadata; each wheel is installed
# into an empty environment, where no compiler can be reached, and trains there.
#
# Usage: scripts/check_wheel.sh [FOLDER]. PYTHONS names the interpreters to build for and to check with; by default
# python3, and the oldest found from 3.12 on. Others from 3.12 on load the compiled module. The manylinux tag is what
# the C library of this machine allows; for an older one run it in a manylinux image. TOOLS is a Python with build,
# twine and auditwheel (make wheel has one).
set -Eeuo pipefail
shopt -s nullglob
cd "$(dirname "$0")/.."
out=${1:-dist}
tools=$(command -v "${TOOLS:-python3}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'echo "check_wheel: FAILED (line $LINENO)" >&2' ERR

say() { echo "check_wheel: $*"; }

# Shows what a command said only where it failed.
quietly() { "$@" > "$work/log" 2>&1 || { cat "$work/log"; return 1; }; }

version_of() { "$1" -c 'import sys; print("%d%02d" % sys.version_info[:2])' 2>/dev/null || true; }

# Interpreters from 3.12 on, the oldest first, one of each version.
newer() {
    local minor path
    for minor in 12 13 14; do
        for path in "$(command -v "python3.$minor" || true)" "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.$minor".*/bin/python3; do
            if [ -x "$path" ] && [ "$(version_of "$path")" = "3$minor" ]; then
                echo "$path"
                break
            fi
        done
    done
    return 0
}

others=$(newer)
if [ -z "${PYTHONS:-}" ]; then
    PYTHONS=${others%%$'\n'*}
    this=$(command -v python3)
    if [ "$(version_of "$this")" -lt 312 ]; then PYTHONS="$PYTHONS $this"; fi
fi

rm -rf "$out"
mkdir -p "$out"
quietly "$tools" -m build --sdist --outdir "$out" .
sdist=$(echo "$out"/*.tar.gz)
say "$sdist"

for python in $PYTHONS; do
    rm -rf "$work/raw"
    "$python" -m venv "$work/build"
    "$work/build/bin/pip" wheel -q --no-deps -w "$work/raw" "$sdist"
    PATH="$(dirname "$tools"):$PATH" quietly "$tools" -m auditwheel repair -w "$out" "$work"/raw/*.whl
    rm -rf "$work/build"
done
"$tools" -m twine check --strict "$out"/*

# Runs a command where nothing is on the path but the environment's own programs.
bare() {
    local environment=$1
    shift
    (cd "$work" && env -u CC -u CXX PATH="$environment/bin" "$@")
}

# The wheel that this interpreter can take, into an empty environment.
install() {
    local python=$1 environment=$2 tag=cp$(version_of "$1" | sed 's/^3\(0*\)/3/')
    shift 2
    local wheels=("$out"/*-"$tag"-"$tag"-*.whl "$out"/*-abi3-*.whl)
    wheel=${wheels[0]}
    "$python" -m venv "$environment"
    bare "$environment" pip install -q --only-binary :all: "$@" "$(realpath "$wheel")"
}

installed=$(realpath scripts/check_installed.py)
constraints=$(realpath constraints.txt)
for python in $PYTHONS; do
    install "$python" "$work/venv" -c "$constraints"
    say "$wheel with $("$python" --version)"
    bare "$work/venv" python -I "$installed"
    rm -rf "$work/venv"
done
for python in $others; do
    case " $PYTHONS " in *" $python "*) continue ;; esac
    install "$python" "$work/venv" --no-deps
    say "$wheel with $("$python" --version), the compiled module alone"
    bare "$work/venv" python -I "$installed" --native
    rm -rf "$work/venv"
done
say "passed; in $out:"
ls "$out"
