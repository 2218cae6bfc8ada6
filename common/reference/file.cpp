#include "common/reference/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace flashsteps {
namespace {

std::filesystem::path directory_of(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
}

// A device or a pipe: there is nothing to lose in it, and a file must not take its place.
bool is_special(const std::filesystem::path& path) {
  std::error_code ignored;
  const std::filesystem::file_status status = std::filesystem::status(path, ignored);
  return std::filesystem::exists(status) && !std::filesystem::is_regular_file(status) &&
         !std::filesystem::is_directory(status);
}

}  // namespace

void write_file(const std::filesystem::path& path, std::initializer_list<std::string_view> parts) {
  const bool special = is_special(path);
  // A link is followed, so that what it points to is replaced and not the link.
  std::error_code ignored;
  const std::filesystem::path target = !special && std::filesystem::is_symlink(path, ignored)
                                           ? std::filesystem::weakly_canonical(path)
                                           : path;
  const auto fail = [&](const char* what) {
    return std::runtime_error(fmt::format("{}: {}: {}", path.string(), what, std::strerror(errno)));
  };
  std::string temporary = target.string() + ".XXXXXX";
  const int file = special ? ::open(target.c_str(), O_WRONLY | O_CLOEXEC)
                           : mkostemp(temporary.data(), O_CLOEXEC);
  if (file < 0) throw fail(special ? "cannot open" : "cannot create a file beside it");
  try {
    for (std::string_view part : parts) {
      while (!part.empty()) {
        const ssize_t written = ::write(file, part.data(), part.size());
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) throw fail("cannot write");
        part.remove_prefix(size_t(written));
      }
    }
    const mode_t mask = ::umask(0);
    ::umask(mask);
    if (!special && ::fchmod(file, 0666 & ~mask) != 0) throw fail("cannot set its permissions");
    if (::close(file) != 0) throw fail("cannot close");
  } catch (...) {
    if (!special) ::unlink(temporary.c_str());
    throw;
  }
  if (special) return;
  if (std::rename(temporary.c_str(), target.c_str()) != 0) {
    const auto failure = fail("cannot rename the new file to it");
    ::unlink(temporary.c_str());
    throw failure;
  }
}

void require_writable(std::string_view option, const std::filesystem::path& path) {
  const auto refuse = [&](const std::string& why) {
    return std::invalid_argument(fmt::format("{} {}: {}", option, path.string(), why));
  };
  if (path.empty() || !path.has_filename()) throw refuse("allowed: the name of a file");
  std::error_code error;
  if (std::filesystem::is_directory(path, error))
    throw refuse("is a directory; allowed: the name of a file");
  if (is_special(path)) {
    if (::access(path.c_str(), W_OK) == 0) return;
    throw refuse(fmt::format("cannot write: {}", std::strerror(errno)));
  }
  const std::filesystem::path directory = directory_of(path);
  if (!std::filesystem::is_directory(directory, error)) {
    throw refuse(fmt::format("there is no directory {}", directory.string()));
  }
  if (::access(directory.c_str(), W_OK | X_OK) != 0) {
    throw refuse(fmt::format("cannot write in {}: {}", directory.string(), std::strerror(errno)));
  }
}

}  // namespace flashsteps
