// Runs the one stage that is linked in, a submission's, on the CPU model: reads a problem and its
// inputs from one pipe, writes O and L, or the gradients, and the ledger to another. It knows no
// right value. Before any
// code of the submission runs, even its static initialisers, the process has given up what it will
// not need (course/sandbox.h).
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/attention/layout.h"
#include "common/gpu/cuda_support.h"
#include "common/model/model.h"
#include "common/model/symbols.h"
#include "common/stage/ledger_json.h"
#include "common/stage/registry.h"
#include "common/stage/run.h"
#include "course/protocol.h"
#include "course/sandbox.h"

// Where the linker put the static variables of the submission (course/grade.py names their
// section).
extern "C" {
[[gnu::weak]] extern char __start_submission_data[];
[[gnu::weak]] extern char __stop_submission_data[];
}

#ifdef FLASHSTEPS_HAS_CUDA
namespace flashsteps {
// A build for cards has this in the file that links the CUDA runtime, which is not to be part of
// this program.
const CudaFacts& cuda_facts() noexcept {
  static const CudaFacts none = [] {
    CudaFacts facts;
    facts.built_with_cuda = false;
    return facts;
  }();
  return none;
}
}  // namespace flashsteps
#endif

namespace {

using namespace flashsteps;
using namespace flashsteps::course;

// How far down from where the program begins the stack may reach; the judge's limit of it
// (RLIMIT_STACK) is below that.
constexpr uintptr_t kStack = 16 << 20;

void read_all(void* to, size_t bytes) {
  for (auto* at = static_cast<char*>(to); bytes > 0;) {
    const ssize_t got = read(kRequestPipe, at, bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) throw std::runtime_error("the request ended too early");
    at += got;
    bytes -= size_t(got);
  }
}

void write_all(const void* from, size_t bytes) {
  for (auto* at = static_cast<const char*>(from); bytes > 0;) {
    const ssize_t put = write(kResponsePipe, at, bytes);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) _exit(1);
    at += put;
    bytes -= size_t(put);
  }
}

// A tensor as bytes.
struct Bytes {
  const void* data = nullptr;
  size_t size = 0;

  Bytes() = default;
  template <typename T>
  Bytes(const std::vector<T>& x) : data(x.data()), size(x.size() * sizeof(T)) {}
};

[[noreturn]] void respond(Response response, const std::string& text,
                          const std::array<Bytes, 3>& tensors = {}) {
  response.text_bytes = uint32_t(text.size());
  for (size_t i = 0; i < tensors.size(); ++i) response.tensor_bytes[i] = tensors[i].size;
  write_all(&response, sizeof(response));
  write_all(text.data(), text.size());
  for (const Bytes& tensor : tensors) write_all(tensor.data, tensor.size);
  _exit(0);  // no code of the submission runs any more
}

[[noreturn]] void terminated() {
  Response response;
  response.outcome = Outcome::fault;
  std::string why = "the submission ended the program";
  try {
    if (std::current_exception()) std::rethrow_exception(std::current_exception());
  } catch (const std::exception& error) {
    why = error.what();
  } catch (...) {
  }
  respond(response, "before the first test: " + why);
}

void close_everything() {
  model::load_symbols();  // from this program's file, which the sandbox does not let it open
  const auto here = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  const auto begin = reinterpret_cast<uintptr_t>(__start_submission_data),
             end = reinterpret_cast<uintptr_t>(__stop_submission_data);
  model::watch_host_code(model::HostMemory{here - kStack, here + 65536, begin, end});
  std::set_terminate(terminated);
  try {
    close_sandbox();
  } catch (const std::exception&) {
    _exit(126);  // the judge says that the grader has failed, not the submission
  }
}
// Runs before the static initialisers of every object of the program.
[[gnu::section(".preinit_array"), gnu::used]] void (*const before_all_others)() = close_everything;

// The submission's stage.
const Stage& stage_named(const char* id, bool backward) {
  const Stage* const stage = first_registered_stage();
  if (!stage) throw DeviceError("the file registers no stage: FLASHSTEPS_STAGE(...) is missing");
  if (stage->next) throw DeviceError("the file registers more than one stage");
  if (std::string(stage->id) != id) {
    throw DeviceError("the file registers stage " + std::string(stage->id) + "; this is lab " + id);
  }
  if (!(backward ? stage->backward != nullptr : stage->forward != nullptr)) {
    throw DeviceError(std::string("the stage has no ") + (backward ? "backward" : "forward") +
                      " pass");
  }
  return *stage;
}

}  // namespace

int main() {
  Request request;
  read_all(&request, sizeof(request));
  const Problem& p = request.problem;
  const auto read_tensor = [](auto& elements, int64_t count) {
    elements.resize(size_t(count));
    read_all(elements.data(), elements.size() * sizeof(elements[0]));
  };
  Inputs inputs;
  read_tensor(inputs.q, layout_q(p).extent());
  read_tensor(inputs.k, layout_k(p).extent());
  read_tensor(inputs.v, layout_v(p).extent());
  BackwardInputs given;
  const GradientStrides strides = strides_of_tensors(p);
  if (request.backward) {
    read_tensor(given.forward.o, layout_o(p).extent());
    read_tensor(given.d_o, layout_do(p, strides).extent());
    read_tensor(given.forward.l, p.rows());
  }
  model::Options options;
  options.seed = request.seed;
  options.workers = 1;
  model::set_options(options);
  Response response;
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  try {
    const Stage& stage = stage_named(request.stage, request.backward);
    const int64_t bytes = device_bytes(stage, p);
    if (bytes < 0 || bytes > request.memory_bytes) {
      throw DeviceError("asks for " + std::to_string(bytes) + " bytes of device memory; " +
                        std::to_string(request.memory_bytes) + " are allowed");
    }
    const auto device = make_model_device();
    nlohmann::ordered_json counts;
    const auto ran = [&](const std::array<Bytes, 3>& tensors) {
      response.outcome = Outcome::ran;
      response.tiles = tiles_of(stage, p);
      response.seconds = seconds();
      respond(response, counts.dump(), tensors);
    };
    if (request.backward) {
      const BackwardRun run = run_backward(*device, stage, p, strides, inputs, given,
                                           {.deterministic = request.deterministic});
      counts["counts"] = *run.ledger;
      ran({run.gradients.dq, run.gradients.dk, run.gradients.dv});
    }
    const ForwardRun run = run_forward(*device, stage, p, inputs);
    counts["counts"] = *run.ledger;
    if (run.lse_ledger) counts["lse_counts"] = *run.lse_ledger;
    ran({run.outputs.o, run.outputs.l});
  } catch (const model::Fault& fault) {
    response.outcome =
        fault.kind() == model::FaultKind::missing_part ? Outcome::missing : Outcome::fault;
    response.seconds = seconds();
    respond(response, fault.what());
  } catch (const std::exception& error) {
    response.outcome = Outcome::refused;
    response.seconds = seconds();
    respond(response, error.what());
  }
}
