#!/bin/sh
# expect_killed.sh PROGRAM: runs the conformance suite of a mutated kernel, and fails unless the suite does.
if [ ! -x "$1" ]; then
  echo "$1 is not built; build the target source_mutants" >&2
  exit 1
fi
# The quick ones first: most mutants do not survive them.
for filter in '*Cases.*:*WhatIsNotFiniteStaysInItsHead*:-*cuda*' '*Backward*:-*Cases*:*KeepsEveryConvention*:*cuda*' '*Conformance.KeepsEveryConvention*:-*cuda*'; do
  log=$("$1" --gtest_fail_fast "--gtest_filter=$filter" 2>&1)
  status=$?
  if [ "$status" -eq 1 ] && printf '%s' "$log" | grep -q '\[  FAILED  \]'; then
    printf '%s\n' "$log" | grep -m 1 -E 'Failure|actual|Which is'
    printf '%s\n' "$log" | grep -m 2 -A 4 'Failure'
    exit 0
  fi
  case $log in *'no test case was selected'*) continue ;; esac  # a forward stage has none of the second kind
  if [ "$status" -ne 0 ]; then
    break  # it crashed, which is not what a test's failure looks like
  fi
done
echo "the suite passes on a broken kernel (exit status $status):"
printf '%s\n' "$log" | tail -n 20
exit 1
