#!/usr/bin/env bash
# What a user of libflashsteps.so meets before calling it.
# usage: capi_library_test.sh header CXX | exports LIBRARY
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1:-} in
  # The header is C99 by itself.
  header)
    "$2" -x c -std=c99 -pedantic -Wall -Wextra -Werror -fsyntax-only -include stddef.h common/capi/flashsteps.h ;;
  # It exports the functions of the header and nothing else: no C++, no CUDA runtime, none of the model's callbacks.
  exports)
    exported=$(nm -D --defined-only "$2" | awk '{ print $3 }' | sort)
    declared=$(grep -o 'flashsteps_[a-z_]*(' common/capi/flashsteps.h | tr -d '(' | sort -u)
    diff <(echo "$declared") <(echo "$exported") || { echo "FAILED: < declared, > exported"; exit 1; } ;;
  *) echo "usage: $0 header CXX | exports LIBRARY" >&2; exit 2 ;;
esac
