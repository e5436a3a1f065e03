#!/bin/sh
# mutate.sh FROM TO SED: a copy with a planted mistake, which has to be one.
set -eu
sed "$3" "$1" >"$2"
! cmp -s "$1" "$2" || { echo "$1 is the same after: $3" >&2; exit 1; }
