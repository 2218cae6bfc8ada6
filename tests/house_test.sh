#!/usr/bin/env bash
# house_test.sh CASE [ARGUMENT…]: the rules of the house that text alone can show.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

failures=0
bad() { printf 'FAILED: %s\n' "$1"; failures=$((failures + 1)); }

case $1 in
  # FROM TO BUDGET: a step of the ladder shows its idea and little else.
  diff_budget)
    changed=$(./lab diff "$2" "$3" --count)
    echo "$2 -> $3: $changed lines of code changed, allowed: $4"
    ((changed <= $4)) || bad "the step $2 -> $3 is too large"
    ((changed > 0)) || bad "the step $2 -> $3 changes nothing" ;;

  # A kernel file is the whole kernel, and no more than a person reads at a sitting.
  kernel_files)
    for file in [0-9][0-9]_*/*.cu; do
      allowed=300
      case $file in 09_* | 1*) allowed=400 ;; esac
      lines=$(sed 's,//.*,,' "$file" | grep -c '[^[:space:]]')
      ((lines <= allowed)) || bad "$file has $lines lines of code, allowed: $allowed"
      ! grep -n -F '/*' "$file" || bad "$file: kernels use // comments only"
      ! grep -n -E '\basm\b' "$file" || bad "$file: inline PTX belongs into common/gpu"
      ! grep -n '<<<' "$file" || bad "$file: kernels are launched by launch(), which checks"
      ! grep -n -E '#include "[0-9]' "$file" || bad "$file: a stage never includes another"
      ! grep -n -E '#include "common/(model|reference|cli|timing)/' "$file" || bad "$file: includes what is not for kernels"
    done
    for stage in [0-9][0-9]_*/; do [[ -e ${stage}README.md ]] || bad "$stage has no lesson, README.md"; done ;;

  # What ptxas said of each kernel file, kept beside its object (cmake/keep_ptxas_log.sh): no register is spilled to
  # memory, and no WGMMA is serialised (its notes have the numbers C7510 to C7519).
  ptxas_log)
    build=$2
    mapfile -t logs < <(find "$build" -path "$build/tests" -prune -o -name '*.cu.o.ptxas' -print | sort)
    for file in [0-9][0-9]_*/*.cu; do
      ls "$build"/CMakeFiles/*/"$file.o.ptxas" >/dev/null 2>&1 || bad "no log of ptxas for $file"
    done
    for log in "${logs[@]}"; do
      grep -q 'Used [0-9]* registers' "$log" || bad "$log names no kernel"
      awk '/Function properties for/ { name = $NF }
           / bytes spill / && !/ 0 bytes spill stores, 0 bytes spill loads/ { print name ":" $0; bad = 1 }
           END { exit bad }' "$log" || bad "$log: registers are spilled"
      ! grep -E 'C75[01][0-9]' "$log" || bad "$log: WGMMA is serialised"
    done ;;

  # Nothing is built with arithmetic that forgets NaN and infinity.
  flags)
    commands=$2/compile_commands.json
    grep -q 'common/reference/compare.cpp' "$commands" || bad "$commands does not tell how the reference is compiled"
    ! grep -n -E -e '-ffast-math|-Ofast|-ffinite-math-only|-funsafe-math|use_fast_math' "$commands" || bad "fast-math" ;;

  # Every link of the documents to a file of the repository leads somewhere.
  links)
    while IFS=: read -r file target; do
      target=${target%%#*}
      [[ -z $target || -e $(dirname "$file")/$target ]] || bad "$file: no such file: $target"
    done < <(find . \( -name build -o -name results -prune -o -name .git \) -prune -o -name '*.md' -print0 |
      xargs -0 grep -o -E '\]\([^)]+\)' | grep -v -E '\]\((https?|mailto):' | sed -E 's/\]\(([^)]*)\)/\1/') ;;

  *) bad "no such case: $1" ;;
esac
((failures == 0))
