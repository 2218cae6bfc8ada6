#!/usr/bin/env bash
# python_install_test.sh LIBRARY: pip installs the package from the source tree into a venv, without a network, and it
# computes there. Exit status 77 where Debian's packages for that are not installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
library=$(readlink -f "$1")
skip() { echo "skipped because: $*"; exit 77; }

# The first interpreter that has a module, and those that it was found to have before.
has=numpy
need() {  # MODULE DEBIAN_PACKAGE
  for python in ${PYTHON:+"$PYTHON"} python3 /usr/bin/python3; do
    if "$python" -c "import $has, $1" 2>/dev/null; then has+=", $1"; return 0; fi
  done
  skip "no python3 has ${has}, $1 ($2)"
}
need numpy python3-numpy
need ensurepip python3-venv
need setuptools python3-setuptools
need wheel python3-wheel

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH FLASHSTEPS_LIBRARY FLASHSTEPS_STAGE FLASHSTEPS_BACKWARD_STAGE
# A source tree of its own: pip leaves build folders in it. Its library is found by way of the path that is remembered.
mkdir -p "$folder/tree/common/capi" "$folder/tree/build/model/lib"
cp -r python "$folder/tree/python"
find "$folder/tree" \( -name __pycache__ -o -name '*.egg-info' -o -name build -path '*/python/*' \) -prune -exec rm -rf {} +
cp common/capi/flashsteps.h "$folder/tree/common/capi/"
ln -s "$library" "$folder/tree/build/model/lib/libflashsteps.so"

"$python" -m venv --system-site-packages "$folder/venv"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONFIG_FILE=/dev/null
if ! "$folder/venv/bin/pip" install --quiet --no-index --no-build-isolation "$folder/tree/python" >"$folder/log" 2>&1; then
  cat "$folder/log"
  echo "FAILED: pip could not install the package"
  exit 1
fi
cd /
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
import numpy as np
import flashsteps

assert flashsteps.__file__.startswith(sys.argv[1] + "/venv/"), flashsteps.__file__
q = np.ones((1, 1, 4, 8), np.float16)
v = np.arange(32, dtype=np.float16).reshape(q.shape)
o = flashsteps.attention(q, q, v, causal=True)
wanted = np.cumsum(v, axis=2) / np.arange(1, 5)[:, None]  # equal weights: a mean of the rows so far
assert np.array_equal(o, wanted.astype(np.float16)), o
print(f"flashsteps {flashsteps.__version__} runs from {flashsteps.library().path}")
PYTHON
"$folder/venv/bin/pip" uninstall --quiet --yes flashsteps
! "$folder/venv/bin/python" -c 'import flashsteps' 2>/dev/null || { echo "FAILED: it is still there after pip uninstall"; exit 1; }
