// A test that has a directory of its own, which goes with it.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

namespace flashsteps {

class DirectoryTest : public testing::Test {
 protected:
  DirectoryTest() {
    std::string name = (std::filesystem::temp_directory_path() / "flashsteps_XXXXXX").string();
    directory_ = mkdtemp(name.data());
  }
  ~DirectoryTest() override {
    std::error_code gone;  // a test may have removed it, or taken its permissions
    std::filesystem::permissions(directory_, std::filesystem::perms::owner_all, gone);
    std::filesystem::remove_all(directory_, gone);
  }

  std::filesystem::path directory_;
};

}  // namespace flashsteps
