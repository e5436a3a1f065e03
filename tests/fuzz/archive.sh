#!/bin/sh
# archive.sh TO [--redefine-sym OLD=NEW]... OBJECT...
#
# An archive of the objects in which some of the functions that they call have other names.
set -eu
to=$1
shift
renamed=
while [ "$1" = --redefine-sym ]; do
    renamed="$renamed $1 $2"
    shift 2
done
rm -f "$to"
ar rcs "$to" "$@"
objcopy $renamed "$to"
