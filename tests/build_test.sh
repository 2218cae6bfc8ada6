#!/usr/bin/env bash
# build_test.sh CASE: one promise of the build, proved by configuring the project in a folder of its own.
# Exits with 77 where this machine cannot prove it (ctest: skipped).
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
unset CUDACXX CUDAARCHS CUDA_PATH CUDA_HOME

fail() { printf 'FAILED: %s\n' "$1"; [[ ! -e $tmp/log ]] || cat "$tmp/log"; exit 1; }
skip() { printf 'skipped because: %s\n' "$1"; exit 77; }

# Configures, expecting `yes` or `no`; the output is in $tmp/log.
configure() {
  local expected=$1 result=yes
  shift
  rm -rf "$tmp/build"
  CUDA_VISIBLE_DEVICES='' cmake -S "$repository" -B "$tmp/build" -G Ninja "$@" >"$tmp/log" 2>&1 || result=no
  [[ $result == "$expected" ]] || fail "configured: $result, expected: $expected (options: $*)"
}
# The log has a line with this text, whole: CMake did not wrap it.
says() { grep -qF -- "$1" "$tmp/log" || fail "the output lacks: $1"; }
says_once() { [[ $(grep -c -F 'FlashSteps: ' "$tmp/log") == 1 ]] || fail "not one line of refusal"; says "$1"; }

# A search path without nvcc: a folder that has one is replaced by links to everything else in it.
hide_nvcc() {
  local folder path='' i=0
  local -a folders
  IFS=: read -ra folders <<<"$PATH"
  for folder in "${folders[@]}"; do
    if [[ -e $folder/nvcc ]]; then
      mkdir "$tmp/path$((++i))"
      ln -s "$folder"/* "$tmp/path$i/"
      rm "$tmp/path$i/nvcc"
      folder=$tmp/path$i
    fi
    path+=:$folder
  done
  PATH=${path#:}
}
need_nvcc() {
  command -v nvcc >/dev/null || PATH=$PATH:/usr/local/cuda/bin
  command -v nvcc >/dev/null || skip "no nvcc"
}

case $1 in
  without_nvcc)
    hide_nvcc
    configure yes
    says "FlashSteps: CUDA left out (no nvcc found)"
    says "FlashSteps: CPU model built with g++"
    configure no -DFLASHSTEPS_CUDA=ON
    says_once "FLASHSTEPS_CUDA=ON, but CUDA is left out (no nvcc found)" ;;
  nvcc_without_card)
    need_nvcc
    configure yes
    says "FlashSteps: CUDA nvcc"
    says "for 80-real;80-virtual;90a-real" ;;
  named_architectures_win)
    need_nvcc
    configure yes -DCMAKE_CUDA_ARCHITECTURES=86
    says "for 86"
    grep -q 'sm_86' "$tmp/build/compile_commands.json" || fail "nothing is compiled for 86"
    ! grep -q -E 'sm_(80|90)' "$tmp/build/compile_commands.json" || fail "something is compiled for 80 or 90"
    CUDAARCHS=89-real configure yes
    says "for 89-real" ;;
  hopper_architecture)
    need_nvcc
    # How the object of a file is compiled for a card: the architectures, one a line.
    architectures() {
      grep -F -- "$1" "$tmp/build/compile_commands.json" | grep -F '"command"' | grep -v FLASHSTEPS_MODEL_TARGET |
        grep -o -E '(sm|compute)_[0-9a-z]+' | sort -u
    }
    configure yes -DCMAKE_CUDA_ARCHITECTURES='80-real;90a-real'
    [[ $(architectures kernels/hopper_clean.cu | tr '\n' ' ') == 'compute_90a sm_90a ' ]] ||
      fail "hopper_clean.cu is compiled for: $(architectures kernels/hopper_clean.cu)"
    architectures kernels/clean.cu | grep -q sm_80 || fail "clean.cu is not compiled for 80"
    configure yes -DCMAKE_CUDA_ARCHITECTURES=90
    [[ $(architectures kernels/hopper_clean.cu | tr '\n' ' ') == 'compute_90a sm_90a ' ]] ||
      fail "hopper_clean.cu is compiled for: $(architectures kernels/hopper_clean.cu)"
    configure yes -DCMAKE_CUDA_ARCHITECTURES=80-real
    says "FlashSteps: tests/kernels/hopper_clean.cu left out for CUDA (it needs 90a; the architectures are 80-real)"
    [[ -z $(architectures kernels/hopper_clean.cu) ]] || fail "hopper_clean.cu is compiled all the same"
    grep -q 'model_units/kernel_hopper_clean.cpp' "$tmp/build/compile_commands.json" ||
      fail "hopper_clean.cu is left out for the model, too" ;;
  old_architecture)
    configure no -DCMAKE_CUDA_ARCHITECTURES='80;75-real'
    says_once "CMAKE_CUDA_ARCHITECTURES: 75-real is too old; cp.async and bf16 need 80 or newer"
    configure no -DCMAKE_CUDA_ARCHITECTURES=native
    says_once "CMAKE_CUDA_ARCHITECTURES: 'native' is not accepted" ;;
  without_boost)
    need_nvcc
    configure yes -DCMAKE_DISABLE_FIND_PACKAGE_Boost=ON
    says "FlashSteps: CPU model left out (no Boost.Context found: install libboost-context-dev)"
    says "FlashSteps: CUDA nvcc"
    ! grep -q FLASHSTEPS_MODEL_TARGET "$tmp/build/compile_commands.json" || fail "the model is built all the same" ;;
  without_both)
    configure no -DCMAKE_DISABLE_FIND_PACKAGE_Boost=ON -DFLASHSTEPS_CUDA=OFF
    says_once "nothing to build for: CUDA is left out (FLASHSTEPS_CUDA=OFF); the CPU model is left out (no Boost.Context" ;;
  missing_packages)
    for package in Eigen3:libeigen3-dev CLI11:libcli11-dev fmt:libfmt-dev nlohmann_json:nlohmann-json3-dev \
      GTest:libgtest-dev; do
      configure no -DFLASHSTEPS_CUDA=OFF -DFLASHSTEPS_TESTS=ON "-DCMAKE_DISABLE_FIND_PACKAGE_${package%%:*}=ON"
      says_once "${package%%:*} not found: install ${package#*:}"
    done
    # Without being asked for tests, it builds the rest.
    configure yes -DFLASHSTEPS_CUDA=OFF -DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON
    says "FlashSteps: tests left out (no GoogleTest found: install libgtest-dev)" ;;
  presets)
    (cd "$repository" && cmake --list-presets >"$tmp/log")
    for preset in model cuda full; do says "\"$preset\""; done ;;
  *) fail "no such case: $1" ;;
esac
