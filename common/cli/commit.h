/// \file
/// Which state of the sources this program was built from.
#pragma once

#include <string>

namespace flashsteps::cli {

/// The commit's 40 digits, with "-dirty" where files differed from it; empty where git did not
/// know.
std::string build_commit();

}  // namespace flashsteps::cli
