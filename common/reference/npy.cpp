#include "common/reference/npy.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "common/reference/file.h"
#include "common/reference/float16.h"

namespace flashsteps {
namespace {

static_assert(std::endian::native == std::endian::little, "the file's bytes are used as they are");

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr int64_t kMaxHeader = 10000;

// What the header's dictionary says, as it stands there.
struct Header {
  std::optional<std::string> descr;
  std::optional<bool> fortran_order;
  std::optional<std::vector<int64_t>> shape;
};

// Reads the one Python literal that NumPy writes: a dictionary of a string, a boolean and a tuple
// of integers.
class HeaderParser {
 public:
  explicit HeaderParser(std::string_view text) : rest_(text) {}

  Header parse() {
    Header header;
    expect('{');
    while (!accept('}')) {
      const std::string key = string();
      expect(':');
      if (key == "descr" && !header.descr) {
        header.descr = descr();
      } else if (key == "fortran_order" && !header.fortran_order) {
        header.fortran_order = boolean();
      } else if (key == "shape" && !header.shape) {
        header.shape = tuple();
      } else {
        fail(fmt::format("key '{}' is unknown or repeated", printable(key)));
      }
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    skip_space();
    if (!rest_.empty()) fail("bytes follow the dictionary");
    if (!header.descr || !header.fortran_order || !header.shape)
      fail("descr, fortran_order or shape is missing");
    return header;
  }

  static std::string printable(std::string_view text) {
    std::string shown;
    for (const char c : text.substr(0, 40)) shown += c >= ' ' && c <= '~' ? c : '?';
    return shown;
  }

 private:
  [[noreturn]] static void fail(const std::string& why) {
    throw std::invalid_argument("its header is not NumPy's: " + why);
  }

  void skip_space() {
    const size_t used = rest_.find_first_not_of(" \t\n");
    rest_.remove_prefix(used == std::string_view::npos ? rest_.size() : used);
  }

  bool accept(char c) {
    skip_space();
    if (rest_.empty() || rest_.front() != c) return false;
    rest_.remove_prefix(1);
    return true;
  }

  void expect(char c) {
    if (!accept(c))
      fail(fmt::format("'{}' expected before '{}'", c, printable(rest_.substr(0, 12))));
  }

  std::string string() {
    const char quote = accept('"') ? '"' : '\'';
    if (quote == '\'') expect('\'');
    const size_t end = rest_.find(quote);
    if (end == std::string_view::npos) fail("a string without end");
    const std::string text(rest_.substr(0, end));
    rest_.remove_prefix(end + 1);
    return text;
  }

  std::string descr() {
    skip_space();
    if (!rest_.empty() && rest_.front() == '[') {
      throw std::invalid_argument("its elements are structures; allowed: float16, float32");
    }
    return string();
  }

  bool boolean() {
    skip_space();
    for (const bool value : {true, false}) {
      const std::string_view word = value ? "True" : "False";
      if (rest_.substr(0, word.size()) == word) {
        rest_.remove_prefix(word.size());
        return value;
      }
    }
    fail("fortran_order is neither True nor False");
  }

  std::vector<int64_t> tuple() {
    std::vector<int64_t> values;
    expect('(');
    while (!accept(')')) {
      values.push_back(integer());
      if (!accept(',')) {
        expect(')');
        if (values.size() == 1) fail("the shape is not a tuple");
        break;
      }
    }
    return values;
  }

  int64_t integer() {
    skip_space();
    const size_t digits = std::min(rest_.find_first_not_of("0123456789"), rest_.size());
    if (digits == 0) fail(fmt::format("the shape holds '{}'", printable(rest_.substr(0, 12))));
    if (digits > 18)
      fail(fmt::format("the shape holds {}; that overflows", printable(rest_.substr(0, digits))));
    const int64_t value = std::stoll(std::string(rest_.substr(0, digits)));
    rest_.remove_prefix(digits);
    return value;
  }

  std::string_view rest_;
};

DType dtype_of(const std::string& descr) {
  if (descr == "<f2") return DType::fp16;
  if (descr == "<f4") return DType::fp32;
  const std::string shown = HeaderParser::printable(descr);
  if (descr == ">f2" || descr == ">f4") {
    throw std::invalid_argument(
        fmt::format("its elements are big-endian ('{}'); allowed: little-endian", shown));
  }
  static constexpr std::pair<const char*, const char*> kNames[] = {
      {"f8", "float64"},
      {"f16", "longdouble"},
      {"i1", "int8"},
      {"i2", "int16"},
      {"i4", "int32"},
      {"i8", "int64"},
      {"u1", "uint8"},
      {"u2", "uint16"},
      {"u4", "uint32"},
      {"u8", "uint64"},
      {"b1", "bool"},
      {"c8", "complex64"},
      {"c16", "complex128"},
      {"O", "Python objects"},
      {"V2", "2-byte void, as of ml_dtypes' bfloat16"}};
  std::string name;
  for (const auto& [code, its_name] : kNames) {
    if (!descr.empty() && descr.substr(1) == code) name = fmt::format("{} ('{}')", its_name, shown);
  }
  if (name.empty()) name = fmt::format("of type '{}'", shown);
  throw std::invalid_argument(fmt::format("its elements are {}; allowed: float16, float32", name));
}

NpyArray read(const std::filesystem::path& path, int dimensions) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) throw std::invalid_argument("there is no such file");
  if (!std::filesystem::is_regular_file(status))
    throw std::invalid_argument("is not a regular file");
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::invalid_argument(fmt::format("cannot be opened: {}", std::strerror(errno)));
  const int64_t file_size = int64_t(std::filesystem::file_size(path));
  int64_t used = 0;
  const auto take = [&](void* to, int64_t bytes, const char* what) {
    if (bytes > file_size - used || !file.read(static_cast<char*>(to), bytes)) {
      throw std::invalid_argument(
          fmt::format("is truncated within its {}: {} bytes in all", what, file_size));
    }
    used += bytes;
  };

  char magic[6];
  if (file_size < int64_t(sizeof magic)) {
    throw std::invalid_argument(fmt::format("is not a .npy file: {} bytes in all", file_size));
  }
  take(magic, sizeof magic, "magic string");
  if (std::string_view(magic, sizeof magic) != kMagic) {
    throw std::invalid_argument("is not a .npy file: it does not begin with \\x93NUMPY");
  }
  unsigned char version[2];
  take(version, sizeof version, "version");
  if ((version[0] != 1 && version[0] != 2) || version[1] != 0) {
    throw std::invalid_argument(
        fmt::format("has format version {}.{}; allowed: 1.0, 2.0", version[0], version[1]));
  }
  uint32_t header_size = 0;
  take(&header_size, version[0] == 1 ? 2 : 4, "header");
  if (header_size > kMaxHeader) {
    throw std::invalid_argument(
        fmt::format("has a header of {} bytes; allowed: up to {}", header_size, kMaxHeader));
  }
  std::string text(header_size, '\0');
  take(text.data(), header_size, "header");
  const Header header = HeaderParser(text).parse();

  NpyArray array;
  array.dtype = dtype_of(*header.descr);
  if (*header.fortran_order) throw std::invalid_argument("is in Fortran order; allowed: C order");
  array.shape = *header.shape;
  if (array.shape.size() != size_t(dimensions)) {
    throw std::invalid_argument(fmt::format("has {} dimensions, shape ({}); needed: {}",
                                            array.shape.size(), fmt::join(array.shape, ", "),
                                            dimensions));
  }
  int64_t elements = 1, bytes = 0;
  bool overflow = false;
  for (const int64_t size : array.shape)
    overflow |= __builtin_mul_overflow(elements, size, &elements);
  overflow |= __builtin_mul_overflow(elements, int64_t{size_of(array.dtype)}, &bytes);
  // A size that overflows on the way, though a later 0 makes the array empty, is nonsense too.
  if (overflow) {
    throw std::invalid_argument(
        fmt::format("has shape ({}); its size overflows", fmt::join(array.shape, ", ")));
  }
  const int64_t found = file_size - used;
  if (found != bytes) {
    throw std::invalid_argument(
        fmt::format("{}: shape ({}) needs {} bytes of data, {} follow the header",
                    found < bytes ? "is truncated" : "has trailing bytes",
                    fmt::join(array.shape, ", "), bytes, found));
  }
  if (array.dtype == DType::fp16) {
    array.fp16.resize(size_t(elements));
    take(array.fp16.data(), bytes, "data");
  } else {
    array.fp32.resize(size_t(elements));
    take(array.fp32.data(), bytes, "data");
  }
  return array;
}

template <typename T>
void write(const std::filesystem::path& path, const char* descr, std::span<const int64_t> shape,
           std::span<const T> data) {
  std::string header = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}{}), }}",
                                   descr, fmt::join(shape, ", "), shape.size() == 1 ? "," : "");
  // Magic, version, length and header together are a multiple of 64 bytes, and a newline ends them.
  const size_t before = kMagic.size() + 4;
  header.append(63 - (before + header.size()) % 64, ' ');
  header += '\n';
  const char preamble[] = {1, 0, char(header.size() & 0xff), char(header.size() >> 8)};
  write_file(path, {kMagic,
                    {preamble, sizeof preamble},
                    header,
                    {reinterpret_cast<const char*>(data.data()), data.size_bytes()}});
}

}  // namespace

double NpyArray::value(int64_t i) const {
  return dtype == DType::fp16 ? from_bits(fp16[i], DType::fp16) : double(fp32[i]);
}

NpyArray read_npy(const std::filesystem::path& path, int dimensions) {
  try {
    return read(path, dimensions);
  } catch (const std::invalid_argument& wrong) {
    throw std::invalid_argument(fmt::format("{}: {}", path.string(), wrong.what()));
  }
}

void write_npy(const std::filesystem::path& path, std::span<const int64_t> shape,
               std::span<const uint16_t> fp16) {
  write(path, "<f2", shape, fp16);
}

void write_npy(const std::filesystem::path& path, std::span<const int64_t> shape,
               std::span<const float> fp32) {
  write(path, "<f4", shape, fp32);
}

}  // namespace flashsteps
