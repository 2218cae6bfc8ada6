/// \file
/// What the program does, a function for each command. Each prints to stdout and returns the exit
/// status: 0 all right, 1 a check failed. Bad input and what the device cannot do are exceptions
/// (main.cpp).
#pragma once

#include "common/cli/options.h"

namespace flashsteps::cli {

int list(const Options& options);
int check(const Options& options);
int count(const Options& options);
int bench(const Options& options);
int ladder(const Options& options);

}  // namespace flashsteps::cli
