#include "common/cli/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

namespace flashsteps::cli {

using std::chrono::steady_clock;

Progress::Progress() {
  if (::isatty(STDERR_FILENO)) thread_ = std::thread(&Progress::run, this);
}

Progress::~Progress() {
  if (!thread_.joinable()) return;
  clear();
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void Progress::say(std::string what) {
  const std::lock_guard lock(mutex_);
  what_ = std::move(what);
  since_ = steady_clock::now();
}

void Progress::clear() {
  const std::lock_guard lock(mutex_);
  what_.clear();
  if (shown_) fmt::print(stderr, "\r\033[K");
  std::fflush(stderr);
  shown_ = false;
}

void Progress::run() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    changed_.wait_for(lock, std::chrono::milliseconds(250));
    const double seconds = std::chrono::duration<double>(steady_clock::now() - since_).count();
    if (stop_ || what_.empty() || (!shown_ && seconds < 1)) continue;
    fmt::print(stderr, "\r\033[K{}, {:.0f} s", what_, seconds);
    std::fflush(stderr);
    shown_ = true;
  }
}

}  // namespace flashsteps::cli
