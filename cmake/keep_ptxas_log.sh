#!/bin/sh
# keep_ptxas_log.sh OBJECT COMMAND…: runs the compile command, and keeps what it says in OBJECT.ptxas, where
# the test of spills and serialised WGMMA reads it. Other output goes on to the build.
log="$1.ptxas"
shift
"$@" >"$log.new" 2>&1
status=$?
grep -v -e '^ptxas info' -e '^    [0-9]* bytes stack frame' -e '^$' "$log.new" >&2
mv "$log.new" "$log"
exit $status
