// The judge of a lab: reads a plan (JSON) from standard input, runs each of its cases in a process
// of its own that holds the submission and nothing else worth reading, compares what comes back
// with the oracle, which that process never sees, and writes what it found (JSON) to standard
// output. course/grade.py makes the plan and turns the findings into points.
#include <fcntl.h>
#include <fmt/format.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/attention/layout.h"
#include "common/attention/validate.h"
#include "common/attention/work.h"
#include "common/reference/compare.h"
#include "common/reference/gradients.h"
#include "common/reference/inputs.h"
#include "common/reference/reference.h"
#include "common/stage/ledger_json.h"
#include "common/stage/prediction.h"
#include "course/protocol.h"

namespace flashsteps::course {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

constexpr uid_t kNobody = 65534;
constexpr size_t kMostText = 1 << 16;  // bytes of a fault's or a ledger's text

struct Limits {
  double cpu_seconds = 10;
  double wall_seconds = 30;
  int64_t memory_bytes = 0;  // of the process; its device buffers may take half of it
};

// What one process gave.
struct Reply {
  Response response;
  std::string text;
  Outputs outputs;      // of a forward pass
  Gradients gradients;  // of a backward pass
  std::string trouble;  // where it gave no reply: why
  bool out_of_time = false;
};

[[noreturn]] void become_runner(const char* program, int request, int response, const Limits& l) {
  const auto limit = [](__rlimit_resource what, rlim_t value) {
    const rlimit both{value, value};
    if (setrlimit(what, &both) != 0) _exit(126);
  };
  const int null = open("/dev/null", O_RDWR);
  // The pipes go out of the way first, so that neither is overwritten before it has moved.
  const int from = fcntl(request, F_DUPFD, 10), to = fcntl(response, F_DUPFD, 10);
  if (null < 0 || from < 0 || to < 0) _exit(126);
  for (const int i : {0, 1, 2}) dup2(null, i);
  if (dup2(from, kRequestPipe) < 0 || dup2(to, kResponsePipe) < 0) _exit(126);
  for (int i = 5; i < 256; ++i) close(i);
  // The file is opened before the process gives up what it may need to reach it.
  const int file = open(program, O_RDONLY | O_CLOEXEC);
  if (file < 0 || chdir("/") != 0) _exit(126);
  setsid();
  limit(RLIMIT_CORE, 0);
  limit(RLIMIT_FSIZE, 0);
  limit(RLIMIT_STACK, 8 << 20);
  limit(RLIMIT_DATA, rlim_t(l.memory_bytes));
  limit(RLIMIT_CPU, rlim_t(l.cpu_seconds + 1));
  if (geteuid() == 0) {
    if (setgroups(0, nullptr) != 0 || setgid(kNobody) != 0 || setuid(kNobody) != 0) _exit(126);
  }
  char name[] = "runner";
  char* const arguments[] = {name, nullptr};
  char* const environment[] = {nullptr};
  fexecve(file, arguments, environment);
  _exit(126);
}

// Writes the request and reads the response at once, until both are done, the process has ended or
// its time is over.
class Conversation {
 public:
  Conversation(int request, int response) : request_(request), response_(response) {
    for (const int pipe : {request, response}) fcntl(pipe, F_SETFL, O_NONBLOCK);
  }

  // Whether the response came, whole or not, before the deadline.
  bool hold(const std::string& question, size_t most_bytes, Clock::time_point deadline) {
    size_t sent = 0;
    bool sending = true;
    while (true) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
      if (left <= 0) return false;
      pollfd waits[2] = {{response_, POLLIN, 0}, {request_, POLLOUT, 0}};
      if (poll(waits, sending ? 2 : 1, int(std::min<int64_t>(left, 1000))) < 0 && errno != EINTR)
        throw std::runtime_error("poll failed");
      if (sending && waits[1].revents) {
        const ssize_t put = write(request_, question.data() + sent, question.size() - sent);
        if (put > 0) sent += size_t(put);
        sending = sent < question.size() && (put > 0 || errno == EAGAIN || errno == EINTR);
      }
      if (!waits[0].revents) continue;
      char piece[1 << 16];
      const ssize_t got = read(response_, piece, sizeof(piece));
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (got <= 0) return true;
      answer.append(piece, size_t(got));
      if (answer.size() > most_bytes) return true;  // what follows is of no use
    }
  }

  std::string answer;

 private:
  int request_, response_;
};

std::string describe_end(int status, const Limits& limits, bool* out_of_time) {
  if (WIFEXITED(status)) {
    return WEXITSTATUS(status) == 126
               ? "the grader could not start the process that runs the submission (it needs "
                 "seccomp filters)"
               : fmt::format("ended with exit status {} before it gave a result",
                             WEXITSTATUS(status));
  }
  const int signal = WTERMSIG(status);
  if (signal == SIGXCPU || signal == SIGKILL) {
    *out_of_time = true;
    return fmt::format("took more than {:g} s of processor time", limits.cpu_seconds);
  }
  if (signal == SIGSYS) return "asked the system for what no kernel needs, and was stopped";
  if (signal == SIGSEGV || signal == SIGBUS) {
    return fmt::format("crashed in host code ({}): an invalid pointer, or a recursion without end",
                       signal == SIGBUS ? "SIGBUS" : "SIGSEGV");
  }
  return fmt::format("was ended by signal {} ({})", signal, strsignal(signal));
}

// Splits an answer into its parts; false where it is not one.
bool parse(const Request& request, const std::string& answer, Reply& reply) {
  if (answer.size() < sizeof(Response)) return false;
  std::memcpy(&reply.response, answer.data(), sizeof(Response));
  const Response& r = reply.response;
  std::array<uint64_t, 3> bytes{};
  if (r.outcome == Outcome::ran) bytes = result_bytes(request.problem, request.backward);
  if (r.outcome > Outcome::refused || r.text_bytes > kMostText || r.tensor_bytes != bytes ||
      answer.size() != sizeof(Response) + r.text_bytes + bytes[0] + bytes[1] + bytes[2])
    return false;
  const char* at = answer.data() + sizeof(Response);
  reply.text.assign(at, r.text_bytes);
  at += r.text_bytes;
  const auto take = [&](auto& elements, uint64_t size) {
    elements.resize(size / sizeof(elements[0]));
    if (size > 0) std::memcpy(elements.data(), at, size);
    at += size;
  };
  if (request.backward) {
    take(reply.gradients.dq, bytes[0]);
    take(reply.gradients.dk, bytes[1]);
    take(reply.gradients.dv, bytes[2]);
  } else {
    take(reply.outputs.o, bytes[0]);
    take(reply.outputs.l, bytes[1]);
  }
  return true;
}

Reply run(const char* program, const Limits& limits, const Request& request, const Inputs& inputs,
          const BackwardInputs& given) {
  std::string question(reinterpret_cast<const char*>(&request), sizeof(request));
  const auto add = [&](const auto& elements) {
    question.append(reinterpret_cast<const char*>(elements.data()),
                    elements.size() * sizeof(elements[0]));
  };
  add(inputs.q);
  add(inputs.k);
  add(inputs.v);
  if (request.backward) {
    add(given.forward.o);
    add(given.d_o);
    add(given.forward.l);
  }

  int ask[2], tell[2];
  if (pipe2(ask, O_CLOEXEC) != 0 || pipe2(tell, O_CLOEXEC) != 0)
    throw std::runtime_error("no pipe could be made");
  const auto begin = Clock::now();
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("no process could be started");
  if (child == 0) become_runner(program, ask[0], tell[1], limits);
  close(ask[0]);
  close(tell[1]);
  Conversation conversation(ask[1], tell[0]);
  const auto bytes = result_bytes(request.problem, request.backward);
  const size_t most = sizeof(Response) + kMostText + size_t(bytes[0] + bytes[1] + bytes[2]);
  const bool in_time = conversation.hold(
      question, most, begin + std::chrono::milliseconds(int64_t(limits.wall_seconds * 1000)));
  close(ask[1]);
  close(tell[0]);
  // Whoever has answered ends by itself; it has nothing more to do.
  int status = 0;
  if (!in_time) kill(child, SIGKILL);
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }

  Reply reply;
  if (!in_time) {
    reply.out_of_time = true;
    reply.trouble = fmt::format("gave no result within {:g} s", limits.wall_seconds);
  } else if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    reply.trouble = describe_end(status, limits, &reply.out_of_time);
  } else if (!parse(request, conversation.answer, reply)) {
    reply.trouble = "ended before it gave a result";
  }
  return reply;
}

template <typename T>
T get(const Json& json, const char* name, T otherwise) {
  return json.contains(name) ? json.at(name).get<T>() : otherwise;
}

Problem problem_of(const Json& json) {
  Problem p;
  p.batch = get(json, "batch", 1);
  p.heads = get(json, "heads", 1);
  p.kv_heads = get(json, "kv_heads", p.heads);
  p.seqlen_q = get(json, "seqlen_q", get(json, "seqlen", 0));
  p.seqlen_k = get(json, "seqlen_k", get(json, "seqlen", 0));
  p.head_dim = get(json, "head_dim", 64);
  p.causal = get(json, "causal", false);
  const std::string dtype = get<std::string>(json, "dtype", "fp16");
  if (dtype != "fp16" && dtype != "bf16")
    throw std::invalid_argument(fmt::format("dtype '{}'; allowed: fp16, bf16", dtype));
  p.dtype = dtype == "bf16" ? DType::bf16 : DType::fp16;
  p.scale = get(json, "scale", default_scale(p.head_dim));
  const std::string layout = get<std::string>(json, "layout", "bhsd");
  if (layout != "bhsd" && layout != "bshd")
    throw std::invalid_argument(fmt::format("layout '{}'; allowed: bhsd, bshd", layout));
  set_packed_strides(p, layout == "bshd" ? Layout::bshd : Layout::bhsd);
  validate(p);
  return p;
}

InputKind kind_of(const std::string& name) {
  for (const InputKind kind : kInputKinds) {
    if (name == name_of(kind)) return kind;
  }
  throw std::invalid_argument(fmt::format("input '{}' is no kind of inputs", name));
}

// What all cases of a plan have in common.
struct Plan {
  std::string runner, stage;
  bool backward = false;
  Limits limits;
  Variation variation;
};

// One line about the gradients; empty where they are right. It names those that are right, since
// which of the three are wrong says most about where the thought went wrong.
std::string describe(const GradientComparison& comparison) {
  std::string text = comparison.describe(), right;
  if (text.empty()) return text;
  for (const TensorComparison* tensor : {&comparison.dq, &comparison.dk, &comparison.dv}) {
    if (tensor->ok) right += (right.empty() ? "" : ", ") + std::string(tensor->tensor);
  }
  return text + "; right: " + (right.empty() ? "none" : right);
}

Json judge(const Plan& plan, const Json& test) {
  const Problem p = problem_of(test);
  const uint64_t seed = get(test, "seed", uint64_t{1});
  const Inputs inputs = make_inputs(p, kind_of(get<std::string>(test, "input", "normal")), seed);
  const GradientStrides strides = strides_of_tensors(p);
  BackwardInputs given;
  if (plan.backward)
    given = {make_d_o(p, strides, seed), reference_outputs(p, inputs, plan.variation)};
  Request request{.problem = p,
                  .backward = plan.backward,
                  .deterministic = get(test, "deterministic", false),
                  .seed = get(test, "schedule", uint64_t{1}),
                  .memory_bytes = plan.limits.memory_bytes / 2};
  if (request.deterministic && !plan.backward)
    throw std::invalid_argument("deterministic is of the backward pass alone");
  plan.stage.copy(request.stage, sizeof(request.stage) - 1);
  const Reply reply = run(plan.runner.c_str(), plan.limits, request, inputs, given);

  Json found;
  found["seconds"] = reply.response.seconds;
  const auto outcome = [&](const char* name, const std::string& message) {
    found["outcome"] = name;
    found["message"] = message;
    return found;
  };
  if (!reply.trouble.empty())
    return outcome(reply.out_of_time ? "out_of_time" : "crashed", reply.trouble);
  switch (reply.response.outcome) {
    case Outcome::fault:
      return outcome("fault", reply.text);
    case Outcome::missing:
      return outcome("missing", reply.text);
    case Outcome::refused:
      return outcome("refused", reply.text);
    case Outcome::ran:
      break;
  }
  const Json counts = Json::parse(reply.text, nullptr, false);
  if (!counts.is_object() || !counts.contains("counts"))
    return outcome("crashed", "gave a result that is none");
  for (const auto& [name, value] : counts.items()) found[name] = value;
  const Tiles tiles = reply.response.tiles;
  found["tiles"] = {{"Br", tiles.Br}, {"Bc", tiles.Bc}};
  if (const auto predicted = predicted_ledger(plan.stage, p)) found["predicted"] = *predicted;
  if (tiles.Br > 0 && tiles.Bc > 0) {
    const TileCounts skipping = skipping_tile_counts(p, tiles.Br, tiles.Bc);
    found["needed_tiles"] = {{"visited", skipping.visited}, {"masked", skipping.masked}};
  }
  std::string wrong;
  if (plan.backward) {
    const GradientOracles oracles =
        make_gradient_oracles(p, strides, inputs, given.d_o, row_statistics(p, strides, given),
                              all_gradient_rows(p), plan.variation);
    wrong = describe(compare(p, strides, oracles, reply.gradients));
  } else {
    const Oracle oracle = make_oracle(p, inputs, all_rows(p), plan.variation);
    wrong = compare(p, oracle, reply.outputs).describe();
  }
  return outcome(wrong.empty() ? "right" : "wrong", wrong);
}

int main_of_judge() {
  signal(SIGPIPE, SIG_IGN);
  const Json asked = Json::parse(std::cin);
  const Json varied = get(asked, "variation", Json::object());
  const std::string pass = get<std::string>(asked, "pass", "forward");
  if (pass != "forward" && pass != "backward")
    throw std::invalid_argument(fmt::format("pass '{}'; allowed: forward, backward", pass));
  const Plan plan{.runner = asked.at("runner"),
                  .stage = asked.at("stage"),
                  .backward = pass == "backward",
                  .limits = {.cpu_seconds = asked.at("cpu_seconds"),
                             .wall_seconds = asked.at("wall_seconds"),
                             .memory_bytes = asked.at("memory_mb").get<int64_t>() << 20},
                  .variation = {.window = get(varied, "window", 0),
                                .softcap = get(varied, "softcap", 0.f),
                                .distance = get(varied, "distance", 0.f),
                                .sink = get(varied, "sink", false)}};
  Json findings = Json::array();
  bool out_of_time = false;
  for (const Json& test : asked.at("cases")) {
    if (out_of_time) {
      findings.push_back(
          {{"outcome", "out_of_time"}, {"message", "was not run: the test before took too long"}});
      continue;
    }
    findings.push_back(judge(plan, test));
    out_of_time = findings.back()["outcome"] == "out_of_time";
  }
  std::cout << findings.dump(1) << '\n';
  return std::cout.flush() ? 0 : 1;
}

}  // namespace
}  // namespace flashsteps::course

int main() {
  try {
    return flashsteps::course::main_of_judge();
  } catch (const std::exception& error) {
    fmt::print(stderr, "grade_judge: {}\n", error.what());
    return 2;
  }
}
