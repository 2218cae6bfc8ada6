#!/usr/bin/env bash
# lab_test.sh CASE: what `lab` promises to a person who types it, proved on a copy of it.
# Exits with 77 where this machine cannot prove it (ctest: skipped).
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
chmod 755 "$tmp"
house=$tmp/house
mkdir "$house"
cp "$repository/lab" "$house/"
cp -r "$repository"/[0-9][0-9]_* "$house/"

fail() { printf 'FAILED: %s\n' "$1"; cat "$tmp/out" "$tmp/err"; exit 1; }
skip() { printf 'skipped because: %s\n' "$1"; exit 77; }

# STATUS COMMAND…: runs it, expecting this exit status; what it said is in $tmp/out and $tmp/err.
expect() {
  local expected=$1 status=0
  shift
  "$@" >"$tmp/out" 2>"$tmp/err" </dev/null || status=$?
  [[ $status == "$expected" ]] || fail "exit status $status, expected $expected: $*"
}
out_has() { grep -qF -- "$1" "$tmp/out" || fail "standard output lacks: $1"; }
err_has() { grep -qF -- "$1" "$tmp/err" || fail "standard error lacks: $1"; }
err_is_one_line() { [[ $(wc -l <"$tmp/err") == 1 ]] || fail "standard error is not one line"; }

# A search path of links to every command of this machine but the named ones; fakes can be put into it. Nothing is
# ever installed by a test.
bin=$tmp/bin
path_without() {
  local folder
  mkdir -p "$bin"
  for folder in /usr/local/bin /usr/sbin /usr/bin /sbin /bin; do ln -s "$folder"/* "$bin/" 2>/dev/null || true; done
  (cd "$bin" && rm -f "$@")
  fake apt-get <<<$'#!/bin/sh\nexit 1'
}
fake() {  # NAME: a command, from standard input
  rm -f "$bin/$1"
  cat >"$bin/$1"
  chmod 755 "$bin/$1"
}
listing() { find "$house" | sort; }

case $1 in
  usage)
    expect 0 "$house/lab" help
    for command in run test diff bench doctor docs handout grade; do out_has "  $command "; done
    expect 2 "$house/lab"
    err_has "usage: ./lab COMMAND"
    expect 2 "$house/lab" tset
    err_has "unknown command 'tset'" ;;
  bad_input)
    for arguments in "run --fast" "test 99" "test 1x" "test --fast" "test 01 02" "diff 01" "diff 01 99" \
      "diff 01 02a --x" "doctor 1" "docs 1" "handout 02a" "handout --out x" "handout 99 --out x" "handout 01 --in x" \
      "grade 01" "grade --submission x" "grade 99 --submission x" "grade 01 --submission" "grade 01 --points 3"; do
      # shellcheck disable=SC2086
      expect 2 "$house/lab" $arguments
      err_is_one_line
      err_has "lab: "
    done
    [[ ! -e $house/build ]] || fail "bad input left a build folder" ;;
  diff)
    # Four lines differ: one changed (two), one removed, one added. Comments, blanks and indentation do not count.
    printf '// one\nint a = 1;\nint b = 2;  // b\n\nint gone;\n  int c;\n' >"$house/01_naive/kernel.cu"
    mkdir -p "$house/90_test"
    printf 'int a = 10;  // changed\nint b = 2;\nint c;\n// new\nint added;\n' >"$house/90_test/kernel.cu"
    expect 0 "$house/lab" diff 01 90 --count
    [[ $(cat "$tmp/out") == 4 ]] || fail "not 4 changed lines"
    COLUMNS=120 expect 0 "$house/lab" diff 1 90
    out_has "2 lines of code removed, 2 added, 4 changed"
    grep -q -E '2 int a = 1; +\| +1 int a = 10;' "$tmp/out" || fail "the changed line is not shown on both sides"
    ! grep -q '// new' "$tmp/out" || fail "a comment is shown without --comments"
    expect 0 "$house/lab" diff 01 90 --comments
    out_has "// new" ;;
  stage_names)
    rm -rf "$house"/[0-9][0-9]_*
    mkdir "$house/02_tiled"
    printf 'int a;\n' >"$house/02_tiled/a_first.cu"
    printf 'int b;\nint c;\n' >"$house/02_tiled/b_second.cu"
    expect 0 "$house/lab" diff 02a 02b --count
    [[ $(cat "$tmp/out") == 3 ]] || fail "not 3 changed lines"
    expect 0 "$house/lab" diff 2b 02 --count
    [[ $(cat "$tmp/out") == 0 ]] || fail "02 is not its last step, 02b"
    expect 2 "$house/lab" diff 02c 02
    err_has "no stage '02c'; there are: 02a 02b" ;;
  without_root)
    path_without ninja sudo
    chmod -R a+rX "$tmp"
    before=$(listing)
    as_nobody=()
    ((EUID != 0)) || as_nobody=(setpriv --reuid=65534 --regid=65534 --clear-groups)
    for command in run test; do
      expect 3 "${as_nobody[@]}" env PATH="$bin" "$house/lab" $command
      out_has "ninja-build"
      [[ ! -e /etc/debian_version ]] || err_has "apt-get install ninja-build"
    done
    [[ $(listing) == "$before" ]] || fail "something was written"
    expect 3 "${as_nobody[@]}" env PATH="$bin" "$house/lab" doctor
    out_has "./lab run lacks: ninja-build" ;;
  install)
    # As root it installs what is missing and nothing else, after saying so.
    ((EUID == 0)) || skip "not root"
    [[ -e /etc/debian_version ]] || skip "not Debian or Ubuntu"
    path_without ninja
    fake apt-get <<<"#!/bin/sh
echo \"\$@\" >>$tmp/apt"
    expect 1 env PATH="$bin" "$house/lab" run
    err_has "installed, but still not found: ninja-build"
    out_has "runs the build"
    [[ $(tail -n 1 "$tmp/apt") == *"install ninja-build" ]] || fail "apt-get was asked for: $(cat "$tmp/apt")" ;;
  bench_without_card)
    path_without nvidia-smi
    expect 3 env PATH="$bin" "$house/lab" bench
    err_is_one_line
    err_has "attention count" ;;
  counts)
    # What ctest reports, counted: a test that could not be run has failed, whatever ctest calls it.
    path_without nvidia-smi
    for tool in doxygen git; do fake $tool <<<'#!/bin/sh'; done
    fake cmake <<<'#!/bin/sh
mkdir -p build/model && echo "CMAKE_HOME_DIRECTORY:INTERNAL=$PWD" >build/model/CMakeCache.txt && touch build/model/build.ninja'
    fake ctest <<<"#!/bin/sh
cp $tmp/junit build/model/test.xml
exit \$(cat $tmp/status)"
    results() {  # STATUS CASE…: what the next ctest reports, and its exit status
      printf '%s\n' "$1" >"$tmp/status"
      {
        printf '<?xml version="1.0" encoding="UTF-8"?>\n<testsuite name="model">\n'
        shift
        for result in "$@"; do
          printf '\t<testcase name="case.%s" classname="x" time="0.1" status="%s">\n' "$result" "${result%%_*}"
          case $result in
            notrun_self) printf '\t\t<skipped message="SKIP_RETURN_CODE=77"/>\n' ;;
            notrun_missing) printf '\t\t<skipped message="Unable to find executable"/>\n' ;;
            fail*) printf '\t\t<failure message=""/>\n' ;;
          esac
          printf '\t\t<system-out>skipped because: no card &lt;8.0&gt;\n</system-out>\n\t</testcase>\n'
        done
        printf '</testsuite>\n'
      } >"$tmp/junit"
    }
    last_line_is() { [[ $(tail -n 1 "$tmp/out") == "$1" ]] || fail "the last line is not: $1"; }
    results 0 run_1 run_2 notrun_self
    expect 0 env PATH="$bin" "$house/lab" test
    out_has "skipped, 1: no card <8.0>"
    last_line_is "2 passed, 0 failed, 1 skipped"
    results 8 run_1 fail_1 notrun_missing notrun_self
    expect 1 env PATH="$bin" "$house/lab" test
    out_has "failed: case.notrun_missing"
    last_line_is "1 passed, 2 failed, 1 skipped"
    results 0 run_1 notrun_missing
    expect 1 env PATH="$bin" "$house/lab" test
    results 8 run_1
    expect 1 env PATH="$bin" "$house/lab" test
    results 0 notrun_self
    expect 1 env PATH="$bin" "$house/lab" test
    # CI without nvcc has failed, even where all tests pass.
    path_without nvcc nvidia-smi cmake ctest
    for tool in doxygen git; do fake $tool <<<'#!/bin/sh'; done
    fake cmake <<<'#!/bin/sh
mkdir -p build/full && echo "CMAKE_HOME_DIRECTORY:INTERNAL=$PWD" >build/full/CMakeCache.txt && touch build/full/build.ninja'
    fake ctest <<<"#!/bin/sh
cp $tmp/junit build/full/test.xml"
    results 0 run_1
    unset CUDACXX
    expect 1 env CI=true CUDA_HOME="$tmp" PATH="$bin" "$house/lab" test --full
    last_line_is "1 passed, 1 failed, 0 skipped"
    expect 0 env CI= CUDA_HOME="$tmp" PATH="$bin" "$house/lab" test --full
    last_line_is "1 passed, 0 failed, 0 skipped" ;;
  shell_scripts)
    command -v shellcheck >/dev/null || skip "no shellcheck"
    expect 0 shellcheck -S warning "$repository/lab" "$repository/.ci/run" "$repository"/tests/*.sh \
      "$repository"/cmake/*.sh "$repository"/course/gradescope/* ;;
  *) fail "no such case: $1" ;;
esac
