// .npy files: what is written is what NumPy writes, and whatever is wrong with a file is told by
// name.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <thread>

#include "common/reference/file.h"
#include "common/reference/float16.h"
#include "common/reference/npy.h"
#include "directory_test.h"

namespace flashsteps {
namespace {

namespace fs = std::filesystem;

class NpyTest : public DirectoryTest {
 protected:
  fs::path path(const char* name = "a.npy") const { return directory_ / name; }

  fs::path file(const std::string& bytes) const {
    std::ofstream(path(), std::ios::binary) << bytes;
    return path();
  }

  // What a reader says of these bytes; empty where it accepts them.
  std::string refusal(const std::string& bytes, int dimensions = 2) const {
    return refusal_of(file(bytes), dimensions);
  }
  std::string refusal_of(const fs::path& file, int dimensions = 2) const {
    try {
      read_npy(file, dimensions);
      return "";
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
  }

  size_t files_in_directory() const {
    return size_t(std::distance(fs::directory_iterator(directory_), fs::directory_iterator()));
  }
};

std::string contents(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

std::string with_header(const std::string& dictionary, const std::string& data, char major = 1,
                        char minor = 0) {
  std::string header = dictionary;
  const size_t before = major == 1 ? 10 : 12;
  header.append(63 - (before + header.size()) % 64, ' ');
  header += '\n';
  std::string bytes = std::string("\x93NUMPY") + major + minor;
  for (int i = 0; i < (major == 1 ? 2 : 4); ++i) bytes += char(header.size() >> (8 * i) & 0xff);
  return bytes + header + data;
}

std::string dictionary(const std::string& descr, const std::string& order,
                       const std::string& shape) {
  return "{'descr': " + descr + ", 'fortran_order': " + order + ", 'shape': " + shape + ", }";
}

const std::string kGood = dictionary("'<f4'", "False", "(2, 3)");
const std::string kData(24, '\1');

// The bytes that numpy.save gives for float16 [[[1, 2, 3]]].
TEST_F(NpyTest, WritesWhatNumPyWrites) {
  const std::array<uint16_t, 3> values = {0x3c00, 0x4000, 0x4200};
  const std::array<int64_t, 3> shape = {1, 1, 3};
  write_npy(path(), shape, std::span<const uint16_t>(values));
  std::string wanted("\x93NUMPY\x01\x00\x76\x00", 10);
  wanted += "{'descr': '<f2', 'fortran_order': False, 'shape': (1, 1, 3), }";
  wanted.append(127 - wanted.size(), ' ');
  wanted += '\n';
  wanted += std::string("\x00\x3c\x00\x40\x00\x42", 6);
  EXPECT_EQ(contents(path()), wanted);
}

TEST_F(NpyTest, ReadsBackWhatItWrote) {
  const std::array<uint16_t, 6> halves = {0, 0x8000, 0x3c00, 0x7bff, 1, 0x7e01};
  const std::array<float, 6> floats = {0.f, -1.5f, 3e38f, 1e-45f, -0.f, 0.1f};
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{6}, {2, 3}, {1, 6, 1}, {1, 2, 3, 1}}) {
    write_npy(path(), shape, std::span<const uint16_t>(halves));
    NpyArray array = read_npy(path(), int(shape.size()));
    EXPECT_EQ(array.shape, shape);
    EXPECT_EQ(array.dtype, DType::fp16);
    EXPECT_EQ(array.fp16, std::vector<uint16_t>(halves.begin(), halves.end()));
    EXPECT_EQ(array.value(3), 65504);
    write_npy(path(), shape, std::span<const float>(floats));
    array = read_npy(path(), int(shape.size()));
    EXPECT_EQ(array.dtype, DType::fp32);
    EXPECT_EQ(0, std::memcmp(array.fp32.data(), floats.data(), sizeof floats));
    EXPECT_EQ(contents(path()).size() % 64, 24u);
    EXPECT_EQ(array.value(2), double(3e38f));
  }
}

TEST_F(NpyTest, EmptyArrays) {
  const std::array<int64_t, 4> shape = {2, 3, 0, 8};
  write_npy(path(), shape, std::span<const float>());
  const NpyArray array = read_npy(path(), 4);
  EXPECT_EQ(array.shape, (std::vector<int64_t>{2, 3, 0, 8}));
  EXPECT_EQ(array.size(), 0);
}

TEST_F(NpyTest, ReadsFilesOfNumPy) {
  const NpyArray q = read_npy("tests/data/ocr1s_q.npy", 4);
  EXPECT_EQ(q.shape, (std::vector<int64_t>{1, 2, 161, 16}));
  EXPECT_EQ(q.dtype, DType::fp16);
  for (int i = 15; i < 161 * 2 * 16; i += 16) ASSERT_EQ(q.value(i), 0);  // padded from 15 channels
  EXPECT_EQ(read_npy("tests/data/ocr1s_lse.npy", 3).dtype, DType::fp32);
}

TEST_F(NpyTest, AcceptsWhatTheFormatAllows) {
  EXPECT_EQ(refusal(with_header(kGood, kData)), "");
  EXPECT_EQ(refusal(with_header(kGood, kData, 2)), "");  // version 2.0
  EXPECT_EQ(
      refusal(with_header("{'shape': (2, 3), 'descr': '<f4', 'fortran_order': False}", kData)), "");
  EXPECT_EQ(
      refusal(with_header("{\"descr\":\"<f4\",\"fortran_order\":False,\"shape\":(2,3)}", kData)),
      "");
  EXPECT_EQ(refusal(with_header(
                "{ 'descr' : '<f4' , 'fortran_order' : False , 'shape' : ( 2 , 3 , ) , }", kData)),
            "");
  EXPECT_EQ(refusal(with_header(dictionary("'<f2'", "False", "(12,)"), kData), 1), "");
}

struct BadHeader {
  const char* name;
  std::string bytes;
  const char* told;
};

TEST_F(NpyTest, RefusesByName) {
  const auto header = [](const std::string& descr, const std::string& order,
                         const std::string& shape) {
    return with_header(dictionary(descr, order, shape), kData);
  };
  const std::string huge(10001, ' ');
  const BadHeader cases[] = {
      {"empty", "", "is not a .npy file: 0 bytes"},
      {"other_file", std::string("PK\3\4 and then some more bytes"), "is not a .npy file"},
      {"magic_cut", "\x93NUM", "is not a .npy file: 4 bytes"},
      {"version_0", with_header(kGood, kData, 0, 1), "has format version 0.1; allowed: 1.0, 2.0"},
      {"version_1_1", with_header(kGood, kData, 1, 1), "has format version 1.1; allowed: 1.0, 2.0"},
      {"version_3", with_header(kGood, kData, 3), "has format version 3.0; allowed: 1.0, 2.0"},
      {"no_version", "\x93NUMPY", "is truncated within its version"},
      {"no_header_size", std::string("\x93NUMPY\1\0\1", 9), "is truncated within its header"},
      {"header_cut", with_header(kGood, "").substr(0, 60), "is truncated within its header"},
      {"huge_header", with_header(kGood + huge, kData), "allowed: up to 10000"},
      {"absurd_header", std::string("\x93NUMPY\2\0\xff\xff\xff\xff", 12),
       "has a header of 4294967295 bytes; allowed: up to 10000"},
      {"float64", header("'<f8'", "False", "(2, 3)"), "float64 ('<f8'); allowed: float16, float32"},
      {"int8", header("'|i1'", "False", "(2, 3)"), "int8 ('|i1'); allowed"},
      {"int32", header("'<i4'", "False", "(2, 3)"), "int32 ('<i4'); allowed"},
      {"bool", header("'|b1'", "False", "(2, 3)"), "bool ('|b1'); allowed"},
      {"complex", header("'<c8'", "False", "(2, 3)"), "complex64 ('<c8'); allowed"},
      {"objects", header("'|O'", "False", "(2, 3)"), "Python objects ('|O'); allowed"},
      {"bfloat16", header("'<V2'", "False", "(2, 3)"), "bfloat16 ('<V2'); allowed"},
      {"unknown", header("'<f3'", "False", "(2, 3)"), "of type '<f3'; allowed: float16, float32"},
      {"native", header("'=f4'", "False", "(2, 3)"), "of type '=f4'; allowed: float16, float32"},
      {"structure", header("[('a', '<f4')]", "False", "(2, 3)"),
       "structures; allowed: float16, float32"},
      {"big_endian_2", header("'>f2'", "False", "(2, 3)"),
       "big-endian ('>f2'); allowed: little-endian"},
      {"big_endian_4", header("'>f4'", "False", "(2, 3)"),
       "big-endian ('>f4'); allowed: little-endian"},
      {"fortran", header("'<f4'", "True", "(2, 3)"), "is in Fortran order; allowed: C order"},
      {"order_word", header("'<f4'", "0", "(2, 3)"), "neither True nor False"},
      {"scalar", header("'<f4'", "False", "()"), "has 0 dimensions, shape (); needed: 2"},
      {"one_dimension", header("'<f4'", "False", "(6,)"), "has 1 dimensions, shape (6); needed: 2"},
      {"three_dimensions", header("'<f4'", "False", "(1, 2, 3)"),
       "has 3 dimensions, shape (1, 2, 3); needed: 2"},
      {"no_tuple", header("'<f4'", "False", "(6)"), "the shape is not a tuple"},
      {"list", header("'<f4'", "False", "[2, 3]"), "its header is not NumPy's"},
      {"negative", header("'<f4'", "False", "(-2, -3)"), "the shape holds '-2, -3"},
      {"long_number", header("'<f4'", "False", "(2, 9999999999999999999)"), "that overflows"},
      {"overflow", header("'<f4'", "False", "(4294967296, 4294967296)"), "its size overflows"},
      {"overflow_bytes", header("'<f4'", "False", "(4611686018427387, 1000)"),
       "its size overflows"},
      {"overflow_then_zero",
       with_header(dictionary("'<f4'", "False", "(999999999999, 999999999999, 0)"), ""),
       "has 3 dimensions"},
      {"truncated", with_header(kGood, kData.substr(1)),
       "is truncated: shape (2, 3) needs 24 bytes of data, 23 follow"},
      {"no_data", with_header(kGood, ""),
       "is truncated: shape (2, 3) needs 24 bytes of data, 0 follow"},
      {"trailing", with_header(kGood, kData + "x"),
       "has trailing bytes: shape (2, 3) needs 24 bytes of data, 25 follow"},
      {"enormous", header("'<f4'", "False", "(1000000000, 1000000)"),
       "is truncated: shape (1000000000, 1000000) needs"},
      {"no_dictionary", with_header("hello", kData), "its header is not NumPy's"},
      {"key_missing", with_header("{'descr': '<f4', 'shape': (2, 3), }", kData), "is missing"},
      {"key_unknown", with_header("{'descr': '<f4', 'color': 'red', }", kData),
       "key 'color' is unknown or repeated"},
      {"key_twice", with_header("{'descr': '<f4', 'descr': '<f4', }", kData),
       "key 'descr' is unknown or repeated"},
      {"no_end", with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)", kData),
       "its header is not NumPy's"},
      {"open_string", with_header("{'descr: 1", kData), "its header is not NumPy's"},
      {"more_after", with_header(kGood + " 1", kData), "bytes follow the dictionary"},
      {"unprintable", with_header("{'\n\x1b[31m': 1}", kData), "key '??[31m' is unknown"},
  };
  for (const BadHeader& bad : cases) {
    const std::string message = refusal(bad.bytes);
    EXPECT_EQ(message.find(path().string() + ": "), 0u) << bad.name << ": " << message;
    EXPECT_NE(message.find(bad.told), std::string::npos) << bad.name << ": " << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << bad.name << ": " << message;
  }
  EXPECT_NE(refusal(with_header(dictionary("'<f4'", "False", "(9999999999, 9999999999, 0)"), ""), 3)
                .find("overflows"),
            std::string::npos);
}

TEST_F(NpyTest, RefusesWhatIsNoFile) {
  EXPECT_NE(refusal_of(path("absent.npy")).find("there is no such file"), std::string::npos);
  EXPECT_NE(refusal_of(directory_).find("is not a regular file"), std::string::npos);
  EXPECT_NE(refusal_of("/dev/zero").find("is not a regular file"), std::string::npos);
  const fs::path pipe = path("pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_NE(refusal_of(pipe).find("is not a regular file"),
            std::string::npos);  // and does not wait for a writer
  if (geteuid() == 0) return;    // who may read everything
  file(with_header(kGood, kData));
  fs::permissions(path(), fs::perms::none);
  EXPECT_NE(refusal_of(path()).find("cannot be opened"), std::string::npos);
}

// No byte of a file, changed or cut off, does more than change a value or cause a refusal.
TEST_F(NpyTest, SurvivesEveryDamage) {
  const std::string good = with_header(kGood, kData);
  for (size_t size = 0; size < good.size(); ++size)
    EXPECT_NE(refusal(good.substr(0, size)), "") << size;
  int refused = 0;
  for (size_t at = 0; at < good.size() - kData.size(); ++at) {
    for (const int flip : {1, 32, 128, 255}) {
      std::string damaged = good;
      damaged[at] = char(damaged[at] ^ flip);
      const std::string message =
          refusal(damaged);  // anything but std::invalid_argument would end the test
      EXPECT_EQ(message.find('\n'), std::string::npos);
      refused += !message.empty();
    }
  }
  EXPECT_GT(refused, 300);
}

TEST_F(NpyTest, AFailedWriteLeavesNothing) {
  const std::array<int64_t, 1> shape = {1};
  const std::array<float, 1> value = {1.f};
  EXPECT_THROW(write_npy(directory_ / "absent" / "a.npy", shape, std::span<const float>(value)),
               std::runtime_error);
  fs::create_directory(path("taken.npy"));
  std::ofstream(path("taken.npy") / "inside") << "x";
  EXPECT_THROW(write_npy(path("taken.npy"), shape, std::span<const float>(value)),
               std::runtime_error);
  EXPECT_EQ(files_in_directory(), 1u);  // no file beside it was left
}

// A pipe or a device is written to. A file in its place would be the end of /dev/null, for root.
TEST_F(NpyTest, WritesToAPipeAndLeavesItOne) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  std::string read;
  std::thread reader([&] {
    std::ifstream in(path("pipe"), std::ios::binary);
    read.assign(std::istreambuf_iterator<char>(in), {});
  });
  require_writable("--out", path("pipe"));
  write_file(path("pipe"), {"one ", "two"});
  reader.join();
  EXPECT_EQ(read, "one two");
  EXPECT_EQ(fs::status(path("pipe")).type(), fs::file_type::fifo);
  EXPECT_EQ(files_in_directory(), 1u);  // no file beside it was left
}

TEST_F(NpyTest, ReplacesAFileAndKeepsALink) {
  file("old");
  fs::create_symlink("a.npy", path("link.npy"));
  const std::array<int64_t, 1> shape = {1};
  const std::array<float, 1> value = {2.5f};
  write_npy(path("link.npy"), shape, std::span<const float>(value));
  EXPECT_TRUE(fs::is_symlink(path("link.npy")));
  EXPECT_EQ(read_npy(path(), 1).value(0), 2.5);
  EXPECT_EQ(files_in_directory(), 2u);
  struct stat status {};
  ASSERT_EQ(stat(path().c_str(), &status), 0);
  const mode_t mask = umask(0);
  umask(mask);
  EXPECT_EQ(status.st_mode & 0777, 0666 & ~mask);
}

TEST_F(NpyTest, RequireWritableSaysWhyNot) {
  const auto refusal = [](const fs::path& path) -> std::string {
    try {
      require_writable("--out", path);
      return "";
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
  };
  EXPECT_EQ(refusal(path()), "");
  EXPECT_EQ(refusal("only_a_name.npy"), "");
  EXPECT_NE(refusal(directory_).find("is a directory"), std::string::npos);
  EXPECT_NE(refusal(directory_ / "absent" / "a.npy").find("there is no directory"),
            std::string::npos);
  EXPECT_NE(refusal("").find("the name of a file"), std::string::npos);
  EXPECT_EQ(refusal(directory_).find("--out "), 0u);
  if (geteuid() == 0) return;
  fs::permissions(directory_, fs::perms::owner_read | fs::perms::owner_exec);
  EXPECT_NE(refusal(path()).find("cannot write in"), std::string::npos);
}

}  // namespace
}  // namespace flashsteps
