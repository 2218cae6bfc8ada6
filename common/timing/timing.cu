#include "common/timing/timing.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "common/attention/layout.h"
#include "common/attention/validate.h"
#include "common/attention/work.h"
#include "common/gpu/cuda_device.h"
#include "common/gpu/cuda_support.h"
#include "common/stage/run.h"
#include "common/timing/cublas.h"
#include "common/timing/statistics.h"

namespace flashsteps {

namespace {

// --- kernels of the harness
// -----------------------------------------------------------------------------------

/// Keeps the stream busy for so many cycles, while the host queues what is to be timed.
__global__ void spin_kernel(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}

/// The finaliser of SplitMix64 (Steele, Lea and Flood 2014): a counter in, 64 random bits out.
__device__ uint64_t random_bits(uint64_t counter) {
  uint64_t z = (counter + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

/// Independent standard normal values (Box and Muller). Never zeros: they cost a card less power,
/// and so time.
template <typename T>
__global__ void fill_normal_kernel(T* out, int64_t count, uint64_t seed) {
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += threads) {
    const uint64_t bits = random_bits(random_bits(seed) + uint64_t(i));
    const float u = (float(uint32_t(bits >> 40)) + 1.f) * 0x1p-24f;  // (0, 1]
    const float v = float(uint32_t(bits) >> 8) * 0x1p-24f;           // [0, 1)
    out[i] = from_float<T>(sqrtf(-2.f * logf(u)) * cospif(2.f * v));
  }
}

void fill_normal(void* out, DType type, int64_t count, uint64_t seed) {
  const int64_t blocks = std::min<int64_t>((count + 255) / 256, 4096);
  if (type == DType::fp16) {
    launch(fill_normal_kernel<fp16_t>, {blocks, 256, 0, nullptr}, static_cast<fp16_t*>(out), count,
           seed);
  } else {
    launch(fill_normal_kernel<bf16_t>, {blocks, 256, 0, nullptr}, static_cast<bf16_t*>(out), count,
           seed);
  }
}

// --- the stopwatch
// --------------------------------------------------------------------------------------------

/// Queues launch number i; i runs on, so that inputs can rotate.
using Launch = std::function<void(int64_t i)>;

class Stopwatch {
 public:
  Stopwatch() {
    int device = 0, khz = 0;
    check_cuda(cudaGetDevice(&device), "asking for the current card");
    check_cuda(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, device),
               "asking for the clock rate");
    cycles_per_us_ =
        std::max(khz, 1'000'000) / 1000.;  // at least 1 GHz, where the driver does not tell
    check_cuda(cudaEventCreate(&start_), "making an event");
    check_cuda(cudaEventCreate(&stop_), "making an event");
  }
  ~Stopwatch() {
    (void)cudaEventDestroy(start_);
    (void)cudaEventDestroy(stop_);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  /// One measurement: milliseconds for each of `launches` launches. The clock starts when a
  /// spinning kernel ends that was queued first; where it ended before everything was queued, so
  /// that the card may have waited for the host, the measurement is made again behind a longer one.
  double measure(const Launch& launch_one, int launches) {
    constexpr double kLongestSpin = 10000;  // us
    for (;;) {
      const double spin = std::min(spin_us_ + 5. * launches, kLongestSpin);
      launch(spin_kernel, {1, 1, 0, nullptr}, static_cast<long long>(spin * cycles_per_us_));
      check_cuda(cudaEventRecord(start_), "recording an event");
      for (int i = 0; i < launches; ++i) launch_one(next_++);
      check_cuda(cudaEventRecord(stop_), "recording an event");
      const cudaError_t still_spinning = cudaEventQuery(start_);
      if (still_spinning == cudaErrorNotReady) {
        (void)cudaGetLastError();  // the runtime keeps it as if it were an error
      } else {
        check_cuda(still_spinning, "running on the card");
      }
      check_cuda(cudaEventSynchronize(stop_), "running on the card");
      float ms = 0;
      check_cuda(cudaEventElapsedTime(&ms, start_, stop_), "reading an event");
      const bool hidden = still_spinning == cudaErrorNotReady;
      if (hidden || spin >= kLongestSpin) {
        host_bound_ |= !hidden;
        return double(ms) / launches;
      }
      spin_us_ *= 2;
    }
  }

  /// Runs the launches until the card is warm and code is loaded. Returns an estimate of one, in
  /// milliseconds.
  double warm_up(const Launch& launch_one, const TimingOptions& options) {
    launch_one(next_++);
    check_cuda(cudaDeviceSynchronize(), "running on the card");
    double one = measure(launch_one, 1);
    for (double spent = one; spent < options.warmup_ms;) {
      const int launches = plan_measurements(one, options).launches;
      one = measure(launch_one, launches);
      spent += std::max(one * launches, 0.1);  // ends for launches that take no time, too
    }
    return one;
  }

  /// Whether, since the last call, a measurement may hold the host's cost.
  bool take_host_bound() { return std::exchange(host_bound_, false); }

 private:
  cudaEvent_t start_ = nullptr, stop_ = nullptr;
  double cycles_per_us_ = 0;
  double spin_us_ = 100;
  int64_t next_ = 0;
  bool host_bound_ = false;
};

TimeResult time_launches(const Launch& launch_one, const TimingOptions& options) {
  Stopwatch stopwatch;
  const MeasurementPlan plan = plan_measurements(stopwatch.warm_up(launch_one, options), options);
  (void)stopwatch.take_host_bound();
  std::vector<double> ms;
  for (int r = 0; r < plan.reps; ++r) ms.push_back(stopwatch.measure(launch_one, plan.launches));
  TimeResult result = summarize(ms, plan.launches);
  result.host_bound = stopwatch.take_host_bound();
  return result;
}

// --- device memory for stages
// ---------------------------------------------------------------------------------

int64_t free_memory() {
  size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "asking for the card's memory");
  return int64_t(free);
}

int64_t l2_bytes() {
  int device = 0, bytes = 0;
  check_cuda(cudaGetDevice(&device), "asking for the current card");
  check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device),
             "asking for the L2 cache");
  return bytes;
}

/// Rounds up to 256 bytes of elements of so many bytes.
int64_t aligned(int64_t count, int element_bytes) {
  const int64_t step = 256 / element_bytes;
  return (count + step - 1) / step * step;
}

/// One set of workspaces that all stages share.
void allocate_workspaces(Device& device, const std::vector<const Stage*>& stages,
                         const Problem& problem, DeviceBuffer (&workspace)[4]) {
  for (int slot = 0; slot < 4; ++slot) {
    int64_t bytes = 0;
    const char* name = "";
    for (const Stage* stage : stages) {
      const WorkspaceList list = stage->workspaces(problem);
      if (slot >= list.size) continue;
      const int64_t needed = list.buffer[slot].count * size_of(list.buffer[slot].dtype);
      if (needed > bytes) bytes = needed, name = list.buffer[slot].name;
    }
    if (bytes > 0) workspace[slot] = DeviceBuffer(device, name, DType::fp32, (bytes + 3) / 4);
  }
}

/// Sets of Q, K, V, O and L to rotate over, and one set of workspaces that all stages share (what a
/// stage reads of them it has written before).
class TimingBuffers {
 public:
  TimingBuffers(Device& device, const std::vector<const Stage*>& stages, const Problem& problem,
                const TimingOptions& options) {
    allocate_workspaces(device, stages, problem, workspace_);

    const int64_t q = aligned(layout_q(problem).extent(), 2);
    const int64_t k = aligned(layout_k(problem).extent(), 2);
    const int64_t v = aligned(layout_v(problem).extent(), 2);
    const int64_t o = aligned(layout_o(problem).extent(), 2);
    const int64_t l = aligned(problem.rows(), 4);
    const int64_t inputs = 2 * (q + k + v);
    const int64_t memory = int64_t(double(free_memory()) * options.memory_share);
    const int sets = rotating_sets(inputs, inputs + 2 * o + 4 * l, l2_bytes(), memory);
    q_ = DeviceBuffer(device, "Q", problem.dtype, sets * q);
    k_ = DeviceBuffer(device, "K", problem.dtype, sets * k);
    v_ = DeviceBuffer(device, "V", problem.dtype, sets * v);
    o_ = DeviceBuffer(device, "O", problem.dtype, sets * o);
    l_ = DeviceBuffer(device, "L", DType::fp32, sets * l);
    fill_normal(q_.data(), problem.dtype, sets * q, 3 * options.seed);
    fill_normal(k_.data(), problem.dtype, sets * k, 3 * options.seed + 1);
    fill_normal(v_.data(), problem.dtype, sets * v, 3 * options.seed + 2);
    for (int set = 0; set < sets; ++set) {
      ForwardArgs args;
      args.Q = static_cast<uint16_t*>(q_.data()) + set * q;
      args.K = static_cast<uint16_t*>(k_.data()) + set * k;
      args.V = static_cast<uint16_t*>(v_.data()) + set * v;
      args.O = static_cast<uint16_t*>(o_.data()) + set * o;
      args.L = static_cast<float*>(l_.data()) + set * l;
      for (int slot = 0; slot < 4; ++slot) args.workspace[slot] = workspace_[slot].data();
      args_.push_back(args);
    }
    device.synchronize();
  }

  const ForwardArgs& args(int64_t i) const { return args_[size_t(i) % args_.size()]; }

 private:
  DeviceBuffer q_, k_, v_, o_, l_, workspace_[4];
  std::vector<ForwardArgs> args_;
};

/// What L is on average over normal Q and K: each score is normal with the variance scale^2 d.
std::vector<float> expected_lse(const Problem& p) {
  std::vector<float> L(size_t(p.rows()));
  for (int64_t row = 0; row < p.rows(); ++row) {
    const double keys = double(visible_keys(p, row % p.seqlen_q));
    L[size_t(row)] = float(std::log(keys) + 0.5 * p.scale * p.scale * p.head_dim);  // -inf for none
  }
  return L;
}

/// Sets of everything that a backward pass reads and writes, likewise. Gradients lie as the tensors
/// that they belong to.
class BackwardTimingBuffers {
 public:
  BackwardTimingBuffers(Device& device, const std::vector<const Stage*>& stages,
                        const Problem& problem, const Stage* forward, const TimingOptions& options)
      : strides_(strides_of_tensors(problem)) {
    allocate_workspaces(device, stages, problem, workspace_);
    const int64_t q = aligned(layout_q(problem).extent(), 2);
    const int64_t k = aligned(layout_k(problem).extent(), 2);
    const int64_t v = aligned(layout_v(problem).extent(), 2);
    const int64_t o = aligned(layout_o(problem).extent(), 2);
    const int64_t l = aligned(problem.rows(), 4);
    const int64_t inputs = 2 * (q + k + v + 2 * o) + 4 * l;
    const int64_t memory = int64_t(double(free_memory()) * options.memory_share);
    const int sets = rotating_sets(inputs, inputs + 2 * (q + k + v), l2_bytes(), memory);
    const auto allocate = [&](const char* name, int64_t count) {
      return DeviceBuffer(device, name, problem.dtype, sets * count);
    };
    q_ = allocate("Q", q);
    k_ = allocate("K", k);
    v_ = allocate("V", v);
    o_ = allocate("O", o);
    d_o_ = allocate("dO", o);
    l_ = DeviceBuffer(device, "L", DType::fp32, sets * l);
    dq_ = allocate("dQ", q);
    dk_ = allocate("dK", k);
    dv_ = allocate("dV", v);
    fill_normal(q_.data(), problem.dtype, sets * q, 5 * options.seed);
    fill_normal(k_.data(), problem.dtype, sets * k, 5 * options.seed + 1);
    fill_normal(v_.data(), problem.dtype, sets * v, 5 * options.seed + 2);
    fill_normal(d_o_.data(), problem.dtype, sets * o, 5 * options.seed + 3);
    if (!forward) fill_normal(o_.data(), problem.dtype, sets * o, 5 * options.seed + 4);
    const auto at = [&](const DeviceBuffer& buffer, int64_t offset) {
      return static_cast<uint16_t*>(buffer.data()) + offset;
    };
    for (int set = 0; set < sets; ++set) {
      BackwardArgs args;
      args.Q = at(q_, set * q);
      args.K = at(k_, set * k);
      args.V = at(v_, set * v);
      args.O = at(o_, set * o);
      args.dO = at(d_o_, set * o);
      args.L = static_cast<float*>(l_.data()) + set * l;
      args.dQ = at(dq_, set * q);
      args.dK = at(dk_, set * k);
      args.dV = at(dv_, set * v);
      for (int slot = 0; slot < 4; ++slot) args.workspace[slot] = workspace_[slot].data();
      args_.push_back(args);
    }
    if (forward) {
      run_forward_stage(device, *forward, problem);
    } else {
      const std::vector<float> L = expected_lse(problem);
      for (const BackwardArgs& args : args_)
        device.upload(const_cast<float*>(args.L), L.data(), L.size() * sizeof(float));
    }
    device.synchronize();
  }

  const GradientStrides& strides() const { return strides_; }
  const BackwardArgs& args(int64_t i) const { return args_[size_t(i) % args_.size()]; }

 private:
  /// O and L of every set.
  void run_forward_stage(Device& device, const Stage& forward, const Problem& problem) {
    DeviceBuffer workspace[4];
    allocate_workspaces(device, {&forward}, problem, workspace);
    for (const BackwardArgs& args : args_) {
      ForwardArgs its;
      its.Q = args.Q;
      its.K = args.K;
      its.V = args.V;
      its.O = const_cast<void*>(args.O);
      its.L = const_cast<float*>(args.L);
      for (int slot = 0; slot < 4; ++slot) its.workspace[slot] = workspace[slot].data();
      its.tiles = forward.tiles(problem);
      forward.forward(problem, its, nullptr);
      if (forward.lse) forward.lse(problem, its, nullptr);
    }
    device.synchronize();  // before the workspaces go
  }

  GradientStrides strides_;
  DeviceBuffer q_, k_, v_, o_, d_o_, l_, dq_, dk_, dv_, workspace_[4];
  std::vector<BackwardArgs> args_;
};

void require_timing(const Device& device, const Problem& problem, const TimingOptions& options) {
  if (device.info().target != Target::cuda) {
    throw DeviceError("timing needs a card: what runs on the CPU model has counts, and no time");
  }
  validate(problem);
  if (visible_pairs(problem) == 0) {
    throw std::invalid_argument(
        "nothing to time: no query sees a key; give sequence lengths of 1 or more");
  }
  if (!(options.measurement_ms > 0 && options.budget_ms > 0 && options.warmup_ms >= 0) ||
      options.max_launches < 1 || options.min_reps < 1 || options.max_reps < options.min_reps ||
      options.rounds < 1 || !(options.memory_share > 0 && options.memory_share <= 1)) {
    throw std::invalid_argument(
        "timing options: times, launches, repetitions and rounds must be positive, max_reps at "
        "least min_reps, and "
        "memory_share in (0, 1]");
  }
}

Launch forward_launch(const Stage& stage, const Problem& problem, const TimingBuffers& buffers,
                      const Variant& variant) {
  const Tiles tiles = tiles_of(stage, problem, variant);
  return [&, tiles, one_block_per_head = variant.one_block_per_head](int64_t i) {
    ForwardArgs args = buffers.args(i);
    args.tiles = tiles;
    args.one_block_per_head = one_block_per_head;
    stage.forward(problem, args, nullptr);
  };
}

Launch backward_launch(const Stage& stage, const Problem& problem,
                       const BackwardTimingBuffers& buffers, const Variant& variant) {
  const Tiles tiles = tiles_of(stage, problem, variant);
  return [&, tiles, deterministic = variant.deterministic](int64_t i) {
    BackwardArgs args = buffers.args(i);
    args.tiles = tiles;
    args.deterministic = deterministic;
    stage.backward(problem, buffers.strides(), args, nullptr);
  };
}

/// Of stage `s`, or as it chooses where there are none.
Variant variant_of(const std::vector<Variant>& variants, size_t s) {
  return variants.empty() ? Variant{} : variants[s];
}

void require_variants(const std::vector<const Stage*>& stages,
                      const std::vector<Variant>& variants) {
  if (!variants.empty() && variants.size() != stages.size()) {
    throw std::invalid_argument("timing: as many variants as stages, or none");
  }
}

/// Times launches in turn, round by round.
InterleavedResult time_interleaved(const std::vector<Launch>& launches,
                                   const TimingOptions& options) {
  Stopwatch stopwatch;
  std::vector<MeasurementPlan> plans;
  InterleavedResult result;
  for (const Launch& launch_one : launches) {
    MeasurementPlan plan = plan_measurements(stopwatch.warm_up(launch_one, options), options);
    plan.reps = (plan.reps + options.rounds - 1) / options.rounds;
    plans.push_back(plan);
    result.kernel.push_back(last_launched_kernel());
  }
  (void)stopwatch.take_host_bound();

  result.round_ms.resize(launches.size());
  std::vector<std::vector<double>> all(launches.size());
  std::vector<bool> host_bound(launches.size(), false);
  for (int round = 0; round < options.rounds; ++round) {
    for (size_t s = 0; s < launches.size(); ++s) {
      std::vector<double> ms;
      for (int r = 0; r < plans[s].reps; ++r)
        ms.push_back(stopwatch.measure(launches[s], plans[s].launches));
      if (stopwatch.take_host_bound()) host_bound[s] = true;
      result.round_ms[s].push_back(median(ms));
      all[s].insert(all[s].end(), ms.begin(), ms.end());
    }
  }
  for (size_t s = 0; s < launches.size(); ++s) {
    result.time.push_back(summarize(all[s], plans[s].launches));
    result.time.back().host_bound = host_bound[s];
  }
  return result;
}

}  // namespace

InterleavedResult time_forward_interleaved(Device& device, const std::vector<const Stage*>& stages,
                                           const Problem& problem, const TimingOptions& options,
                                           const std::vector<Variant>& variants) {
  require_timing(device, problem, options);
  require_variants(stages, variants);
  const TimingBuffers buffers(device, stages, problem, options);
  std::vector<Launch> launches;
  for (size_t s = 0; s < stages.size(); ++s)
    launches.push_back(forward_launch(*stages[s], problem, buffers, variant_of(variants, s)));
  return time_interleaved(launches, options);
}

InterleavedResult time_backward_interleaved(Device& device, const std::vector<const Stage*>& stages,
                                            const Problem& problem, const Stage* forward,
                                            const TimingOptions& options,
                                            const std::vector<Variant>& variants) {
  require_timing(device, problem, options);
  require_variants(stages, variants);
  const BackwardTimingBuffers buffers(device, stages, problem, forward, options);
  std::vector<Launch> launches;
  for (size_t s = 0; s < stages.size(); ++s)
    launches.push_back(backward_launch(*stages[s], problem, buffers, variant_of(variants, s)));
  return time_interleaved(launches, options);
}

TimeResult time_backward(Device& device, const Stage& stage, const Problem& problem,
                         const Stage* forward, const TimingOptions& options,
                         const Variant& variant) {
  TimingOptions one_round = options;
  one_round.rounds = 1;
  return time_backward_interleaved(device, {&stage}, problem, forward, one_round, {variant})
      .time.front();
}

TimeResult time_forward(Device& device, const Stage& stage, const Problem& problem,
                        const TimingOptions& options, const Variant& variant) {
  TimingOptions one_round = options;
  one_round.rounds = 1;
  return time_forward_interleaved(device, {&stage}, problem, one_round, {variant}).time.front();
}

std::optional<TimeResult> time_lse(Device& device, const Stage& stage, const Problem& problem,
                                   const TimingOptions& options) {
  require_timing(device, problem, options);
  if (!stage.lse) return std::nullopt;
  const TimingBuffers buffers(device, {&stage}, problem, options);
  stage.forward(problem, buffers.args(0), nullptr);
  return time_launches([&](int64_t i) { stage.lse(problem, buffers.args(i), nullptr); }, options);
}

Ceilings measure_ceilings(Device& device, const TimingOptions& options) {
  Problem any;  // its options are checked with those of stages
  any.seqlen_q = any.seqlen_k = 1;
  any.head_dim = 8;
  set_packed_strides(any);
  require_timing(device, any, options);

  Ceilings ceilings;
  {
    const int64_t bytes =
        std::min<int64_t>(int64_t{1} << 30,
                          int64_t(double(free_memory()) * options.memory_share) / 2) /
        512 * 512;
    const DeviceBuffer from(device, "the copy's source", DType::bf16, bytes / 2);
    const DeviceBuffer to(device, "the copy's target", DType::bf16, bytes / 2);
    fill_normal(from.data(), DType::bf16, bytes / 2, options.seed);
    const TimeResult copy = time_launches(
        [&](int64_t) {
          check_cuda(cudaMemcpyAsync(to.data(), from.data(), size_t(bytes),
                                     cudaMemcpyDeviceToDevice, nullptr),
                     "copy on the card");
        },
        options);
    ceilings.copy_tb_per_s = 2. * double(bytes) / (copy.median_ms * 1e-3) / 1e12;
  }

  const std::unique_ptr<Cublas> cublas = Cublas::load(ceilings.matmul_source);
  if (cublas) try {
      constexpr int64_t n = 8192;
      const DeviceBuffer A(device, "A of the large product", DType::bf16, n * n);
      const DeviceBuffer B(device, "B of the large product", DType::bf16, n * n);
      const DeviceBuffer C(device, "C of the large product", DType::bf16, n * n);
      fill_normal(A.data(), DType::bf16, n * n, 2 * options.seed);
      fill_normal(B.data(), DType::bf16, n * n, 2 * options.seed + 1);
      const TimeResult product = time_launches(
          [&](int64_t) { cublas->product_bf16(n, A.data(), B.data(), C.data()); }, options);
      ceilings.matmul_tflops = 2. * double(n) * n * n / (product.median_ms * 1e-3) / 1e12;
    } catch (const DeviceFault&) {
      throw;
    } catch (const DeviceError& error) {
      ceilings.matmul_source = std::string("no product ceiling: ") + error.what();
    }
  return ceilings;
}

}  // namespace flashsteps
