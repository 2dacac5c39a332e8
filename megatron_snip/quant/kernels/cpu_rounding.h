// Vectorised random bits (rounding.py), rounding to the grid and codes (grid.py); included by cpu_kernels.h.

// One row's generator.  The first two rounds are the same for a whole row, except the products with the column.
struct Philox {
  uint32_t c0, c1, c2, c3, k0, k1;

  SNIP_TARGET Philox(const Form& form, uint64_t row) {
    const uint64_t p1 = uint64_t(uint32_t(row >> 32)) * 0xCD9E8D57u;
    const uint64_t p0 = uint64_t(uint32_t(p1 >> 32) ^ uint32_t(row) ^ form.key0) * 0xD2511F53u;
    k0 = form.key0 + 0x9E3779B9u;
    k1 = form.key1 + 0xBB67AE85u;
    c2 = form.iteration ^ form.key1;
    c0 = uint32_t(p1) ^ k0;
    c1 = uint32_t(p0 >> 32) ^ k1;
    c3 = uint32_t(p0);
  }

  // The draws of kWays * 2 * kGroup columns from 8 * column on.  Several ways run at once, because each step waits for
  // the previous one.
  template <int kWays>
  FN void draws(uint32_t column, uint16_t* out) const {
    static constexpr W kCounting = SNIP_COUNTING;
    W x0[kWays], x1[kWays], x2[kWays], x3[kWays];
#pragma GCC unroll 8
    for (int i = 0; i < kWays; ++i) {
      const W p0 = multiply(kCounting + (column + i * (kLanes / 2)), 0xD2511F53u);
      const W p1 = multiply((p0 >> 32) ^ c2, 0xCD9E8D57u);
      x0[i] = (p1 >> 32) ^ c0;
      x1[i] = p1;
      x2[i] = p0 ^ c1;  // only the low half of each word matters
      x3[i] = W{} + c3;
    }
    uint32_t key0 = k0, key1 = k1;
#pragma GCC unroll 8
    for (int round = 2; round < 7; ++round) {
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
#pragma GCC unroll 8
      for (int i = 0; i < kWays; ++i) {
        const W p0 = multiply(x0[i], 0xD2511F53u), p1 = multiply(x2[i], 0xCD9E8D57u);
        x0[i] = (p1 >> 32) ^ x1[i] ^ uint64_t(key0);
        x1[i] = p1;
        x2[i] = (p0 >> 32) ^ x3[i] ^ uint64_t(key1);
        x3[i] = p0;
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kWays; ++i) {
      const W first = low_halves(x0[i], x1[i]), second = low_halves(x2[i], x3[i]);
      store(out + 2 * i * kGroup, interleave(first, second, false), false);
      store(out + (2 * i + 1) * kGroup, interleave(first, second, true), false);
    }
  }
};

// The draws of a strip's columns, and of those before them down to a multiple of 8.  col: the first column, global.
SNIP_TARGET __attribute__((noinline)) void random_draws(const Philox& philox, uint64_t col, int cols, uint16_t* draws) {
  const uint32_t column = uint32_t(col >> 3);
  constexpr int kWays = 8, kStep = 2 * kGroup;
  cols += int(col & 7);
  int j = 0;
  for (; j + kWays * kStep <= cols; j += kWays * kStep) philox.draws<kWays>(column + j / 8, draws + j);
  for (; j < cols; j += kStep) philox.draws<1>(column + j / 8, draws + j);
}

// --- Rounding

struct Rounder {
  float max, saturation;
  int32_t emin, add, steps, mantissa;
  int32_t stored_emin, stored_add, code_shift, code_bias, sign_shift;
  bool carried;

  SNIP_TARGET Rounder(const Grid& g, const Grid& s) {
    max = g.max, saturation = g.saturation;
    mantissa = g.mantissa_bits << 23;
    emin = (g.emin + 127) << 23;
    add = (23 - g.mantissa_bits) << 23;
    steps = (254 << 23) + mantissa;
    code_shift = 23 - s.mantissa_bits;
    code_bias = (s.emin + 127) << s.mantissa_bits;
    stored_emin = (s.emin + 127) << 23;
    stored_add = (23 - s.mantissa_bits) << 23;
    sign_shift = 31 - __builtin_ctz(unsigned(s.sign_code));
    carried = g.mantissa_bits != s.mantissa_bits || g.emin != s.emin;
  }
};

// One vector: a dequantised value as float32 bits, or a code in each lane.
template <bool kCodes, bool kStochastic>
FN U cast_lanes(F x, F encode, F scale, U draws, const Rounder& r, I& saturated) {
  const F y = x * encode;
  const U sign = as<U>(y) & 0x80000000u;
  F size = as<F>(as<U>(y) & 0x7fffffffu);
  if constexpr (kCodes) saturated -= as<I>(size > r.saturation);
  size = least(broadcast(r.max), size);
  I exponent = most(as<I>(size) & 0x7f800000, I{} + r.emin);
  F q;
  I count;
  if constexpr (kStochastic) {
    const F t = size * as<F>(r.steps - exponent), lower = floor_of(t);
    const F draw = as<F>((draws & 0x007fff80u) | 0x3f800040u) - 1.0f;  // (draw + 1/2) * 2**-16
    const F n = draw < t - lower ? lower + 1.0f : lower;
    q = n * as<F>(exponent - r.mantissa);
    if constexpr (kCodes) count = __builtin_convertvector(n, I);
  } else {
    const F c = as<F>(exponent + r.add), sum = size + c;
    q = sum - c;
    if constexpr (kCodes) count = as<I>(sum) - as<I>(c);
  }
  if constexpr (!kCodes) return as<U>(q * scale) | sign;
  if (r.carried) {
    exponent = most(as<I>(q) & 0x7f800000, I{} + r.stored_emin);
    const F c = as<F>(exponent + r.stored_add);
    count = as<I>(q + c) - as<I>(c);
  }
  const U code = as<U>(count + (exponent >> r.code_shift) - r.code_bias) | (sign >> r.sign_shift);
  return as<U>(y != y ? I{} + 0xff : as<I>(code));
}

template <class T, bool kCodes, bool kStochastic, bool kUniform>
struct Row {
  using Out = std::conditional_t<kCodes, uint8_t, T>;
  const float *encode, *decode;  // as factors() reads them
  int shift;
  const uint16_t* random;
  const Rounder& r;
  int64_t ahead;  // distance from an element to one that is needed soon

  // kGroup columns from column j on.
  FN void group(const T* x, Out* out, int j, bool stream, I& saturated) const {
    __builtin_prefetch(x + ahead);
    if constexpr (sizeof(T) == 4) __builtin_prefetch(x + ahead + kLanes);
    const Pair<F> v = load_pair(x), to_grid = factors<T, kUniform>(encode, j, shift);
    Pair<F> back{};
    if constexpr (!kCodes) back = factors<T, kUniform>(decode, j, shift);
    Pair<U> draws{};
    if constexpr (kStochastic) draws = load_draws<T>(random + j);
    const U a = cast_lanes<kCodes, kStochastic>(v.a, to_grid.a, back.a, draws.a, r, saturated);
    const U b = cast_lanes<kCodes, kStochastic>(v.b, to_grid.b, back.b, draws.b, r, saturated);
    if constexpr (kCodes) store_codes<T>(out, {a, b}, stream);
    else store_pair(out, {as<F>(a), as<F>(b)}, stream);
  }

  FN void cast(const T* x, Out* out, int cols, bool stream, I& saturated) const {
    int j = 0;
    for (; j + kGroup <= cols; j += kGroup) group(x + j, out + j, j, stream, saturated);
    if (j == cols) return;
    T some[kGroup] = {};
    Out result[kGroup];
    std::memcpy(some, x + j, (cols - j) * sizeof(T));
    group(some, result, j, false, saturated);
    std::memcpy(out + j, result, (cols - j) * sizeof(Out));
  }
};
