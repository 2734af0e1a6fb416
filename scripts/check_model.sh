#!/bin/sh
# Try every interleaving of models/tile.pml with Spin, and see that it finds each bug that BUG=1.. puts in.
set -eu
cd "$(dirname "$0")/.."

if ! command -v spin >/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "no spin in PATH: installing the package"
        apt-get update -qq && apt-get install -y -qq spin >/dev/null
    else
        echo "check_model.sh: no spin in PATH: install it (Debian and Ubuntu: apt-get install spin)" >&2
        exit 1
    fi
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# verify BUG: prints what the verifier found
verify() {
    spin "-DBUG=$1" -a -o3 models/tile.pml >/dev/null
    mv pan.* "$folder"
    (cd "$folder" && "${CC:-cc}" -O2 -DNP -DNOFAIR -w -o cycles pan.c && "${CC:-cc}" -O2 -DSAFETY -w -o pan pan.c
        ./pan -m100000 && ./cycles -l -m100000)
}

found=$(verify 0)
echo "$found" | grep -E "states, stored|errors:"
if echo "$found" | grep -q "errors: [1-9]\|max search depth too small"; then
    echo "$found"
    echo "check_model.sh: the protocol fails" >&2
    exit 1
fi
for bug in 1 2 3 4 5 6; do
    if verify $bug | grep -q "errors: [1-9]"; then
        echo "bug $bug: found"
    else
        echo "check_model.sh: bug $bug is not found: the model proves nothing about it" >&2
        exit 1
    fi
done
