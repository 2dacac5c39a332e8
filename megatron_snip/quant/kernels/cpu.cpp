// The casts of cast.py on CPU, bit for bit the same.  Source: megatron_snip/quant/casts/cast.py.
//
// Plain C ABI, loaded with ctypes by cpu.py; no Python or torch header.  This file distributes the work over threads.
// cpu_kernels.h and its includes do the work.  They are compiled once per instruction set and chosen at run time, so a
// build stays valid on an older machine of the same cluster, unlike with -march=native.
// Exactness: build without -ffast-math and with -ffp-contract=off, because a fused multiply-add would change bits.
// Divisions are true divisions, and subnormals are not flushed whatever the caller's mode.

#include "cpu.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <numeric>
#include <system_error>
#include <thread>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernel takes two bfloat16 apart as little-endian words"
#endif

#define FN SNIP_TARGET __attribute__((always_inline)) inline

namespace megatron_snip {
namespace {

// Columns of a strip: whole blocks, and whole cache lines if blocks allow.
int64_t tall_strip(int64_t block_cols) {
  const int64_t aligned = std::lcm(block_cols, int64_t(64)), step = aligned <= kTallStrip ? aligned : block_cols;
  return kTallStrip / step * step;
}

namespace generic {
#define SNIP_LANES 4
#define SNIP_COUNTING {0, 1}
#define SNIP_TARGET
#include "cpu_kernels.h"
#undef SNIP_TARGET
#undef SNIP_COUNTING
#undef SNIP_LANES
}  // namespace generic

#if defined(__x86_64__) && !defined(MEGATRON_SNIP_GENERIC)
namespace avx2 {
#define SNIP_LANES 8
#define SNIP_COUNTING {0, 2, 1, 3}
#define SNIP_TARGET __attribute__((target("avx2,fma")))
#include "cpu_kernels.h"
#undef SNIP_TARGET
#undef SNIP_COUNTING
#undef SNIP_LANES
}  // namespace avx2

namespace avx512 {
#define SNIP_LANES 16
#define SNIP_COUNTING {0, 4, 1, 5, 2, 6, 3, 7}
#define SNIP_TARGET __attribute__((target("avx2,avx512f,avx512bw,avx512dq,avx512vl")))
#include "cpu_kernels.h"
#undef SNIP_TARGET
#undef SNIP_COUNTING
#undef SNIP_LANES
}  // namespace avx512
#endif

constexpr int32_t kAbi = 17;

int32_t best_isa() {
#if defined(__x86_64__) && !defined(MEGATRON_SNIP_GENERIC)
  __builtin_cpu_init();
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ? 0 : wide ? 2 : 1;
#else
  return 0;
#endif
}

// isa: 0 generic, 1 AVX2, 2 AVX-512; tests choose a lower one than this machine's best.
const Kernels& kernels([[maybe_unused]] int32_t isa) {
#if defined(__x86_64__) && !defined(MEGATRON_SNIP_GENERIC)
  static const int32_t best = best_isa();
  if (std::min(isa, best) == 2) return avx512::kKernels;
  if (std::min(isa, best) == 1) return avx2::kKernels;
#endif
  return generic::kKernels;
}

// --- Threads

// Units of work, handed out one at a time to whichever thread is free.
class Job {
 public:
  explicit Job(int64_t units) : units_(units) {}
  virtual void unit(int64_t index) = 0;

  void work() {
#if defined(__x86_64__)
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode & ~0x8040u & ~0x6000u);  // no flush to zero, no denormals as zero, round to nearest
#endif
    for (int64_t i = next_++; i < units_; i = next_++) unit(i);
#if defined(__x86_64__)
    _mm_sfence();  // streamed stores become visible before the job's end does
    _mm_setcsr(mode);
#endif
  }

 protected:
  ~Job() = default;

 private:
  const int64_t units_;
  std::atomic<int64_t> next_{0};
};

// torch's own OpenMP team, if torch has one in this process (GNU's entry point, which others offer too).  Its threads
// spin for some milliseconds after a GEMM, so threads of ours would have to share the cores with them.
using Team = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);

Team team() {
  static const Team found = reinterpret_cast<Team>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return found;
}

// Threads that sleep between jobs, if there is no team; starting new ones would cost tens of microseconds.
class Pool {
 public:
  // The caller works too, and alone if another thread's job has the pool.
  void run(Job& job, int64_t threads) {
    std::unique_lock<std::mutex> mine(one_job_, std::defer_lock);
    if (threads <= 1 || !mine.try_lock()) return job.work();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      try {
        for (; started_ < threads - 1; ++started_) std::thread(&Pool::serve, this).detach();
      } catch (const std::system_error&) {
        // No more threads available: the existing ones do the work.
      }
      job_ = &job;
      wanted_ = std::min(started_, threads - 1);
    }
    wake_.notify_all();
    job.work();
    std::unique_lock<std::mutex> lock(mutex_);
    wanted_ = 0;  // threads that have not woken up are no longer needed
    done_.wait(lock, [this] { return working_ == 0; });
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return wanted_ > 0; });
      --wanted_;
      ++working_;
      Job* job = job_;
      lock.unlock();
      job->work();
      lock.lock();
      if (--working_ == 0) done_.notify_one();
    }
  }

  std::mutex one_job_, mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  int64_t started_ = 0, wanted_ = 0, working_ = 0;
};

std::atomic<Pool*> the_pool{nullptr};
std::atomic<bool> forked{false};

// A forked child has none of its parent's threads: it starts a new pool, and GNU's OpenMP would wait forever.
const int watching_forks = pthread_atfork(nullptr, nullptr, [] {
  the_pool = nullptr;
  forked = true;
});

// Never destroyed, because its threads may outlive main.
Pool& pool() {
  Pool* pool = the_pool;
  if (pool == nullptr) {
    Pool* mine = new Pool;
    if (the_pool.compare_exchange_strong(pool, mine)) return *mine;
    delete mine;
  }
  return *pool;
}

// --- Jobs

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rectangles of a tensor [rows, cols], row by row.
class Tiles : public Job {
 public:
  Tiles(int64_t rows, int64_t cols, int64_t height, int64_t width)
      : Job(divide_up(rows, height) * divide_up(cols, width)),
        rows_(rows), cols_(cols), height_(height), width_(width) {}

  void unit(int64_t index) override {
    const int64_t across = divide_up(cols_, width_), row = index / across * height_, col = index % across * width_;
    tile(row, std::min(rows_, row + height_), col, std::min(cols_, col + width_));
  }
  virtual void tile(int64_t row, int64_t last_row, int64_t col, int64_t last_col) = 0;

 protected:
  ~Tiles() = default;

 private:
  const int64_t rows_, cols_, height_, width_;
};

// Minimum elements of a tile: it must be worth handing out, and fit the L2 cache.
constexpr int64_t kTile = 1 << 17;

// Casts a tile to all forms before the next tile, so that x comes from memory once.
class CastJob final : public Tiles {
 public:
  CastJob(const Call& call, const Form* first, int count, int64_t height, int64_t width)
      : Tiles(call.rows, call.cols, height, width), call_(call), first_(first), count_(count),
        kernels_(kernels(call.isa)) {}

  void tile(int64_t row, int64_t last_row, int64_t col, int64_t last_col) override {
    for (int i = 0; i < count_; ++i) {
      const int64_t saturated = kernels_.cast(call_, first_[i], row, last_row, col, last_col);
      if (saturated && first_[i].saturated) __atomic_fetch_add(first_[i].saturated, saturated, __ATOMIC_RELAXED);
    }
  }

 private:
  const Call& call_;
  const Form* const first_;
  const int count_;
  const Kernels& kernels_;
};

void run(Job& job, int64_t threads) {
  if (threads > 1 && !forked && team()) team()([](void* job) { static_cast<Job*>(job)->work(); }, &job, unsigned(threads), 0);
  else pool().run(job, threads);
}

void run_forms(const Call& call, const Form* first, int count) {
  int64_t rows = 1, cols = 1;
  for (int i = 0; i < count; ++i) {
    rows = std::lcm(rows, int64_t(first[i].block_rows));
    cols = std::lcm(cols, int64_t(first[i].block_cols));
  }
  if (count > 1 && (rows > kTallStrip || cols > kTallStrip)) {  // blocks that never meet within a tile
    for (int i = 0; i < count; ++i) run_forms(call, first + i, 1);
    return;
  }
  const int64_t strip = tall_strip(cols);
  int64_t width = rows == 1 ? divide_up(call.cols, strip) * strip : strip;
  const int64_t wide = kStrip / strip * strip;  // several strips, each fetched during the one before it
  if (rows > 1 && count == 1 && divide_up(call.rows, rows) * divide_up(call.cols, wide) >= 4 * call.threads)
    width = wide;
  const int64_t height = divide_up(kTile / 4, std::min(width, call.cols) * rows) * rows;
  CastJob job(call, first, count, height, std::max<int64_t>(width, 1));
  run(job, call.threads);
}

class DecodeJob final : public Tiles {
 public:
  explicit DecodeJob(const Decode& call)
      : Tiles(call.rows, call.cols, divide_up(kTile, std::min<int64_t>(call.cols, kStrip)), kStrip), call_(call) {}
  void tile(int64_t row, int64_t last_row, int64_t col, int64_t last_col) override {
    kernels(call_.isa).decode(call_, row, last_row, col, last_col);
  }

 private:
  const Decode& call_;
};

// A flat range in parts of kTile elements of `size` bytes: finds the largest magnitude, or copies if there is a `to`.
class FlatJob final : public Tiles {
 public:
  FlatJob(const void* from, void* to, int64_t count, int64_t size)
      : Tiles(1, count, 1, kTile), from_(static_cast<const char*>(from)), to_(static_cast<char*>(to)), size_(size) {}
  void tile(int64_t, int64_t, int64_t col, int64_t last_col) override {
    const Kernels& best = kernels(2);
    if (to_) return best.copy(from_ + col * size_, to_ + col * size_, (last_col - col) * size_);
    const uint32_t mine = best.amax(from_ + col * size_, last_col - col, size_ == 2);
    uint32_t seen = most;
    while (seen < mine && !most.compare_exchange_weak(seen, mine)) {
    }
  }
  std::atomic<uint32_t> most{0};

 private:
  const char* const from_;
  char* const to_;
  const int64_t size_;
};

class AdamWJob final : public Tiles {
 public:
  explicit AdamWJob(const AdamW& call)
      : Tiles(call.rows, call.cols, divide_up(kTile / 4, std::min<int64_t>(call.cols, kStrip)), kStrip), call_(call) {}
  void tile(int64_t row, int64_t last_row, int64_t col, int64_t last_col) override {
    kernels(call_.isa).adamw(call_, row, last_row, col, last_col);
  }

 private:
  const AdamW& call_;
};

}  // namespace
}  // namespace megatron_snip

using namespace megatron_snip;

extern "C" int32_t megatron_snip_abi() { return kAbi; }

// The best instruction set of this machine.
extern "C" int32_t megatron_snip_isa() { return best_isa(); }

// rows and cols are at least 1, block_cols at most kStrip.
extern "C" void megatron_snip_cast(const Call* call, const Form* forms) {
  for (int i = 0; i < call->form_count; ++i)
    if (forms[i].saturated) *forms[i].saturated = 0;
  run_forms(*call, forms, call->form_count);
}

extern "C" void megatron_snip_decode(const Decode* call) {
  DecodeJob job(*call);
  run(job, call->threads);
}

// rows and cols are at least 1.
extern "C" void megatron_snip_adamw(const AdamW* call) {
  AdamWJob job(*call);
  run(job, call->threads);
}

// Largest finite magnitude of count bfloat16 (size 2) or float32 (size 4) numbers.
extern "C" void megatron_snip_amax(const void* x, int64_t count, int32_t size, int32_t threads, float* out) {
  FlatJob job(x, nullptr, count, size);
  run(job, threads);
  const uint32_t bits = job.most;
  std::memcpy(out, &bits, sizeof bits);
}

// Non-temporal copy, for benchmarks of memory bandwidth; addresses and bytes are multiples of 64.
extern "C" void megatron_snip_copy(const void* from, void* to, int64_t bytes, int32_t threads) {
  FlatJob job(from, to, bytes / 4, 4);
  run(job, threads);
}

// The order of a blend, see data/blending.py: weights [datasets], counts [datasets] of zeros, chosen and number [size].
extern "C" void megatron_snip_blend(const double* weights, int64_t datasets, int64_t size, int64_t* counts,
                                    int16_t* chosen, int64_t* number) {
  for (int64_t i = 0; i < size; ++i) {
    const double step = static_cast<double>(i > 1 ? i : 1);
    int64_t best = 0;
    double largest = weights[0] * step - static_cast<double>(counts[0]);
    for (int64_t k = 1; k < datasets; ++k) {
      const double error = weights[k] * step - static_cast<double>(counts[k]);
      if (error > largest) {
        best = k;
        largest = error;
      }
    }
    chosen[i] = static_cast<int16_t>(best);
    number[i] = counts[best]++;
  }
}
