#!/usr/bin/env bash
# Gradescope runs this once, when it builds the autograder's image: installs what the grader needs and builds it, so that
# grading a submission compiles nothing but the submission. docs/labs.md says how the zip file is made.
set -euo pipefail
autograder=${AUTOGRADER:-/autograder}
export DEBIAN_FRONTEND=noninteractive
apt-get -q -y update
apt-get -q -y --no-install-recommends install g++ cmake ninja-build python3 \
  libeigen3-dev libcli11-dev libfmt-dev nlohmann-json3-dev libboost-context-dev
cd "$autograder/source/FlashSteps"
cmake --preset model -DFLASHSTEPS_TESTS=OFF
# One compiler at a time: an image may be built with little memory.
cmake --build build/model -j 1 --target grade
# The ledger counts what the compiler keeps, and this image's may be another than the one that the formulas were tested with:
# so the stage's own kernel must get all points here, or there is no autograder.
LAB=''
# shellcheck source=/dev/null
source "$autograder/source/lab.conf"
step=${LAB:2}
kernels=("${LAB:0:2}"_*/"${step:+${step}_}"*.cu)
python3 course/grade.py "${kernels[0]}" --build build/model --submission "${kernels[0]}" --secret setup --json /tmp/own.json
python3 -c 'import json; own = json.load(open("/tmp/own.json")); exit(own["score"] < own["max_score"])'
# Shapes, solutions and the secret are none of the user's that submissions run as.
chmod 700 "$autograder/source"
