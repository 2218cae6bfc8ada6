/// \file
/// Writing files so that nobody ever sees half of one.
#pragma once

#include <filesystem>
#include <initializer_list>
#include <string_view>

namespace flashsteps {

/// Writes the parts, one after another, to a new file beside `path`, then renames it to `path`.
/// A device or a pipe is written to as it is.
///
/// \throws std::runtime_error with one line that begins with the path; the new file is then gone
void write_file(const std::filesystem::path& path, std::initializer_list<std::string_view> parts);

/// Refuses a path that write_file could not write, before any work is done for it.
///
/// \throws std::invalid_argument with one line that begins with `option`, as in "--json"
void require_writable(std::string_view option, const std::filesystem::path& path);

}  // namespace flashsteps
