#!/usr/bin/env bash
# Kernels compiled for the CPU model touch memory only by loads and stores that the compiler instrumented. A call
# such as memcpy would move bytes that the model does not see, so no object of a kernel file may make one.
# usage: model_symbols_test.sh OBJECT...
set -euo pipefail
(($# > 0)) || { echo "usage: $0 OBJECT..." >&2; exit 2; }
unseen='^(_*mem(cpy|move|set|cmp|chr)(_chk)?|bcopy|bzero|str[a-z]+|malloc|calloc|realloc|free|operator (new|delete).*)$'
failed=0
for object in "$@"; do
  symbols=$(nm --demangle --undefined-only "$object" | sed 's/^ *[Uw] //')
  grep -q '__tsan_read' <<<"$symbols" || { echo "$object: has no instrumented load: not a kernel for the model?"; failed=1; }
  if bad=$(grep -E "$unseen" <<<"$symbols"); then
    echo "$object: calls what the model does not see: ${bad//$'\n'/, }"
    failed=1
  fi
done
exit "$failed"
