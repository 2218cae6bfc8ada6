/// \file
/// A line on stderr that shows what is running, where a person is watching and it takes longer than
/// a second.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace flashsteps::cli {

class Progress {
 public:
  Progress();
  ~Progress();  ///< clears the line
  Progress(const Progress&) = delete;

  /// What runs from now on: "checking 02b (3 of 6)".
  void say(std::string what);
  /// Clears the line, so that results can be printed; it comes back with the next say.
  void clear();

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::string what_;  // empty: show nothing
  std::chrono::steady_clock::time_point since_;
  bool shown_ = false;
  bool stop_ = false;
  std::thread thread_;  // only where stderr is a terminal
};

}  // namespace flashsteps::cli
