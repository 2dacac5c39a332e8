// The casts of cast.py on CPU, bit for bit the same.  Source: megatron_snip/quant/cast.py.
//
// Plain C ABI, loaded with ctypes by cpu.py; no Python or torch header.  Loops run over panels of at
// most 128 columns and are written for the compiler's vectoriser: no branch depends on data.
// Build without -ffast-math and with -ffp-contract=off: a fused multiply-add would change bits.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#define INLINE inline __attribute__((always_inline))

// One body compiled for several instruction sets and chosen at load time: a build stays valid on an
// older machine of the same cluster, which -march=native does not.
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && !defined(MEGATRON_SNIP_NO_CLONES)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

// Mirrored field by field by cpu.py's _Call; change kAbi there and here with it.
struct Call {
  const void* x;   // [rows, cols], contiguous, bfloat16 or float32
  void* out;       // [rows, cols]: dequantised values of x's type, or codes (uint8)
  float* scales;   // [row blocks, column blocks], or null
  int64_t rows, cols;
  int64_t row0, col0;                // global position of the first element, for the random bits
  int32_t block_rows, block_cols;    // block_cols <= kPanel
  int32_t bfloat16, codes, stochastic;
  int32_t mantissa_bits, emin, sign_code;
  uint32_t key0, key1, iteration;
  float element_max;
  int32_t threads;
};

namespace {

constexpr int32_t kAbi = 1;
constexpr int kPanel = 128;
constexpr float kFloatMax = 3.402823466e+38f;

using bfloat16 = uint16_t;

INLINE uint32_t bits_of(float v) {
  uint32_t b;
  std::memcpy(&b, &v, sizeof b);
  return b;
}

INLINE float float_of(uint32_t b) {
  float v;
  std::memcpy(&v, &b, sizeof v);
  return v;
}

INLINE float load(float v) { return v; }
INLINE float load(bfloat16 v) { return float_of(uint32_t(v) << 16); }

INLINE void store(float v, float* out) { *out = v; }
INLINE void store(float v, bfloat16* out) {
  const uint32_t b = bits_of(v);
  const uint32_t rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  *out = bfloat16(v != v ? 0x7fc0u : rounded);
}

// The magnitude's bits, 0 for infinities and NaN; as unsigned numbers they order like the values.
INLINE uint32_t finite_size(float v) {
  const uint32_t b = bits_of(v) & 0x7fffffffu;
  return b < 0x7f800000u ? b : 0u;
}
INLINE uint16_t finite_size(bfloat16 v) {
  const uint16_t b = v & 0x7fffu;
  return b < 0x7f80u ? b : uint16_t(0);
}
INLINE float from_size(uint32_t b) { return float_of(b); }
INLINE float from_size(uint16_t b) { return load(bfloat16(b)); }

struct Grid {
  float max;
  uint32_t emin_bits;      // float32 bits of 2**emin
  uint32_t mantissa_bits;  // of the element
  uint32_t sign_code;
};

// 32 x 4 words of Philox-4x32-10 for column groups first_group, first_group + 1, ...
INLINE void philox(uint32_t* out, uint32_t first_group, uint64_t row, const Call& call) {
  for (uint32_t lane = 0; lane < kPanel / 4; ++lane) {
    uint32_t c0 = first_group + lane, c1 = uint32_t(row), c2 = uint32_t(row >> 32), c3 = call.iteration;
    uint32_t k0 = call.key0, k1 = call.key1;
    for (int round = 0; round < 10; ++round) {
      const uint64_t p0 = uint64_t(c0) * 0xD2511F53u, p1 = uint64_t(c2) * 0xCD9E8D57u;
      c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
      c1 = uint32_t(p1);
      c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
      c3 = uint32_t(p0);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    out[4 * lane] = c0;
    out[4 * lane + 1] = c1;
    out[4 * lane + 2] = c2;
    out[4 * lane + 3] = c3;
  }
}

// n words for the columns from col on; the buffer holds two panels, for a col that is no multiple of 4.
INLINE const uint32_t* random_words(uint32_t* buffer, uint64_t row, uint64_t col, int n, const Call& call) {
  const int skip = int(col & 3);
  philox(buffer, uint32_t(col >> 2), row, call);
  if (skip + n > kPanel) philox(buffer + kPanel, uint32_t(col >> 2) + kPanel / 4, row, call);
  return buffer + skip;
}

template <class T, class Out, bool kStochastic>
INLINE void cast_row(const T* x, Out* out, int n, const float* encode, const float* scale,
                     const uint32_t* words, const Grid& grid) {
  const uint32_t m = grid.mantissa_bits;
  for (int j = 0; j < n; ++j) {
    const float y = load(x[j]) * encode[j];
    const uint32_t sign = bits_of(y) & 0x80000000u;
    float size = float_of(bits_of(y) & 0x7fffffffu);
    size = grid.max < size ? grid.max : size;  // in this order NaN stays
    const uint32_t exponent = std::max(bits_of(size) & 0x7f800000u, grid.emin_bits);
    const float c = float_of(exponent + ((23u - m) << 23));
    float q = (size + c) - c;
    const uint32_t step_bits = exponent - (m << 23);
    const float steps = float_of((254u << 23) - step_bits);  // 1 / step
    if (kStochastic) {
      const float step = float_of(step_bits);
      const float lower = q > size ? q - step : q;
      const float draw = float(int32_t(words[j] >> 8)) * 0x1p-24f;
      q = lower + (draw < (size - lower) * steps ? step : 0.0f);
    }
    if constexpr (sizeof(Out) == 1) {
      const uint32_t count = uint32_t(int32_t(size != size ? 0.0f : q * steps));
      const uint32_t code = count + ((exponent - grid.emin_bits) >> 23 << m) + (sign >> 31) * grid.sign_code;
      out[j] = Out(size != size ? 0xffu : code);
    } else {
      store(float_of(bits_of(q * scale[j]) | sign), out + j);
    }
  }
}

INLINE void scale_of(float amax, float element_max, float* encode, float* scale) {
  const float e = element_max / amax;
  *encode = e > kFloatMax ? kFloatMax : e;
  *scale = amax > 0.0f ? 1.0f / *encode : 0.0f;
}

// One panel: amax of its block, or of each of its columns where blocks are one column wide, then the casts.
template <class T, class Out, bool kStochastic>
INLINE void cast_panel(const Call& call, const Grid& grid, int64_t row, int rows, int64_t col, int cols,
                       float* scales) {
  const T* x = static_cast<const T*>(call.x) + row * call.cols + col;
  Out* out = static_cast<Out*>(call.out) + row * call.cols + col;
  decltype(finite_size(T())) amax[kPanel] = {};
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < cols; ++j) amax[j] = std::max(amax[j], finite_size(x[i * call.cols + j]));
  float encode[kPanel], scale[kPanel];
  if (call.block_cols == 1) {
    for (int j = 0; j < cols; ++j) scale_of(from_size(amax[j]), grid.max, encode + j, scale + j);
    if (scales)
      for (int j = 0; j < cols; ++j) scales[j] = scale[j];
  } else {
    auto most = amax[0];
    for (int j = 1; j < cols; ++j) most = std::max(most, amax[j]);
    scale_of(from_size(most), grid.max, encode, scale);
    for (int j = 1; j < cols; ++j) encode[j] = encode[0], scale[j] = scale[0];
    if (scales) *scales = scale[0];
  }
  uint32_t buffer[2 * kPanel];
  for (int i = 0; i < rows; ++i) {
    const uint32_t* words = nullptr;
    if (kStochastic) words = random_words(buffer, call.row0 + row + i, call.col0 + col, cols, call);
    cast_row<T, Out, kStochastic>(x + i * call.cols, out + i * call.cols, cols, encode, scale, words, grid);
  }
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t panel_cols(const Call& call) { return call.block_cols == 1 ? kPanel : call.block_cols; }
int64_t panel_count(const Call& call) {
  return divide_up(call.rows, call.block_rows) * divide_up(call.cols, panel_cols(call));
}

template <class T, class Out, bool kStochastic>
INLINE void cast_panels(const Call& call, int64_t first, int64_t last) {
  const Grid grid = {call.element_max, uint32_t(call.emin + 127) << 23, uint32_t(call.mantissa_bits),
                     uint32_t(call.sign_code)};
  const int64_t width = panel_cols(call), across = divide_up(call.cols, width);
  const int64_t scale_cols = divide_up(call.cols, call.block_cols);
  for (int64_t panel = first; panel < last; ++panel) {
    const int64_t band = panel / across, col = panel % across * width, row = band * call.block_rows;
    const int rows = int(std::min<int64_t>(call.block_rows, call.rows - row));
    const int cols = int(std::min<int64_t>(width, call.cols - col));
    float* scales = call.scales ? call.scales + band * scale_cols + col / call.block_cols : nullptr;
    if (cols == kPanel)  // the common case with a constant trip count
      cast_panel<T, Out, kStochastic>(call, grid, row, rows, col, kPanel, scales);
    else
      cast_panel<T, Out, kStochastic>(call, grid, row, rows, col, cols, scales);
  }
}

template <class T, class Out>
INLINE void choose_rounding(const Call& call, int64_t first, int64_t last) {
  if (call.stochastic) cast_panels<T, Out, true>(call, first, last);
  else cast_panels<T, Out, false>(call, first, last);
}

CLONES void run(const Call& call, int64_t first, int64_t last) {
  if (call.bfloat16 && call.codes) choose_rounding<bfloat16, uint8_t>(call, first, last);
  else if (call.bfloat16) choose_rounding<bfloat16, bfloat16>(call, first, last);
  else if (call.codes) choose_rounding<float, uint8_t>(call, first, last);
  else choose_rounding<float, float>(call, first, last);
}

}  // namespace

extern "C" int32_t megatron_snip_abi() { return kAbi; }

extern "C" void megatron_snip_cast(const Call* call) {
  const int64_t panels = panel_count(*call);
  const int64_t threads = std::max<int64_t>(1, std::min<int64_t>(call->threads, panels));
  const auto share = [&](int64_t i) { run(*call, panels * i / threads, panels * (i + 1) / threads); };
  std::vector<std::thread> workers;
  int64_t started = 1;  // share 0 is this thread's
  try {
    for (; started < threads; ++started) workers.emplace_back(share, started);
  } catch (const std::system_error&) {
    // No more threads to be had: this one does the rest.
  }
  share(0);
  for (int64_t i = started; i < threads; ++i) share(i);
  for (auto& worker : workers) worker.join();
}
