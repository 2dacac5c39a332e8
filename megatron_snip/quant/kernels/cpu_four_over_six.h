// Chooses between a block's two scales under kE4m34over6 (scales.py's four_over_six); included by cpu_kernels.h.
//
// A lane is a block, or part of one: errors are added one after another, as in the specification.

// The squared error of a magnitude, in units of the tensor's scale.
FN F squared_error(F size, F wanted, F encode, F scale, const Rounder& r) {
  const F y = least(broadcast(r.max), size * encode);
  const F c = as<F>(most(as<I>(y) & 0x7f800000, I{} + r.emin) + r.add);
  const F error = ((y + c) - c) * scale - wanted;
  return error * error;
}

// Both candidates of kLanes blocks, and their errors so far.
struct Candidates {
  F encode, scale, other_encode, other_scale, whole;
  F error, other_error;

  FN void add(F size, const Rounder& r) {
    const F wanted = size * whole;
    error += squared_error(size, wanted, encode, scale, r);
    other_error += squared_error(size, wanted, other_encode, other_scale, r);
  }
};

FN Candidates candidates(const Scratch& s, int block, float whole) {
  return {load<F>(s.encode + block), load<F>(s.stored + block), load<F>(s.other_encode + block),
          load<F>(s.other_stored + block), broadcast(whole), F{}, F{}};
}

// Take the other candidate where its error is smaller: all ones in `take`.
FN void settle(Scratch& s, int block, I take) {
  store(s.encode + block, take ? load<F>(s.other_encode + block) : load<F>(s.encode + block), false);
  store(s.stored + block, take ? load<F>(s.other_stored + block) : load<F>(s.stored + block), false);
}

FN bool is_e2m1(const Grid& g) { return g.mantissa_bits == 1 && g.emin == 0 && g.max == 6.0f; }

// Magnitudes of kLanes elements, `step` apart; only `count` of them exist.  0 where one is not finite.
template <class T>
FN F sizes_of(const T* x, int64_t step, int64_t count) {
  alignas(64) float sizes[kLanes] = {};
  const int lanes = int(std::min<int64_t>(count, kLanes));
  for (int i = 0; i < lanes; ++i)
    sizes[i] = size_as_float<T>(size_of<T>(load<typename Sizes<T>::Word>(x + i * step)));
  return load<F>(sizes);
}

// The same of kLanes adjacent elements.
FN F finite_or_zero(U size) { return as<F>(size < 0x7f800000u ? size : U{}); }
FN F row_of_sizes(const float* x) { return finite_or_zero(load<U>(x) & 0x7fffffffu); }
FN F row_of_sizes(const bfloat16* x) {
  return finite_or_zero((__builtin_convertvector(load<Half>(x), U) << 16) & 0x7fffffffu);
}

// --- Estimates for E2M1 in blocks with sides of 1 and 16

// Adds to `sum` the squared error of magnitudes that become less than 7, in units of kUnit squares of the scale.  It is
// not finite where a magnitude is not.  Ties go to either side, since both are as far.  encode: times kFactor.
#if SNIP_LANES == 16
// In quarters: the nearest E2M1 numbers, by the whole quarters of a magnitude.  Sums and products alternate, because
// CPUs have units for each.
constexpr float kFactor = 4.0f, kUnit = 1.0f / 16;
alignas(64) constexpr float kNearest[32] = {0,  2,  2,  4,  4,  6,  6,  8,  8,  8,  12, 12, 12, 12, 16, 16,
                                            16, 16, 16, 16, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24};

FN F add_squared(F size, F encode, F sum) {
  const F y = size * encode;
  const __m512 at = _mm512_add_round_ps(y, broadcast(0x1p23f), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  const __m512 nearest =
      _mm512_permutex2var_ps(_mm512_load_ps(kNearest), _mm512_castps_si512(at), _mm512_load_ps(kNearest + 16));
  const F error = nearest - y;
  return _mm512_fmadd_ps(error, error, sum);
}
#else
constexpr float kFactor = 1.0f, kUnit = 1.0f;

FN F add_squared(F size, F encode, F sum) {
  const F y = size * encode;
#if SNIP_LANES == 8
  const F bounded = _mm256_max_ps(y, broadcast(1.0f));
#else
  const F bounded = y > 1.0f ? y : broadcast(1.0f);
#endif
  const F c = as<F>((as<I>(bounded) & 0x7f800000) + (22 << 23));
  const F error = ((y + c) - c) - y;
#if SNIP_LANES == 8
  return _mm256_fmadd_ps(error, error, sum);
#else
  return sum + error * error;
#endif
}
#endif

// Both candidates' errors.
struct Estimate {
  F encode, other_encode, error, other_error;

  FN Estimate(F encode, F other_encode)
      : encode(encode * kFactor), other_encode(other_encode * kFactor), error{}, other_error{} {}

  FN void add(F size) {
    error = add_squared(size, encode, error);
    other_error = add_squared(size, other_encode, other_error);
  }

  // Words with two bfloat16 or one float32 each, with their signs.
  template <class T>
  FN void add_all(W words) {
    if constexpr (sizeof(T) == 2) add(as<F>((as<U>(words) << 16) & 0x7fffffffu));
    add(as<F>(as<U>(words) & (sizeof(T) == 2 ? 0x7fff0000u : 0x7fffffffu)));
  }
};

// What estimates leave until blocks are settled: kept where factors are later.
FN void keep(Scratch& s, int block, F error, F other_error) {
  store(s.encode_of + block, error, false);
  store(s.decode_of + block, other_error, false);
}

// Settle kLanes blocks by their estimated errors, and return a mask of those whose errors nearly agree, which are left
// as they were.
//
// Both ways round the same y.  An element's error here differs from the exact one by five roundings, at most
// 5 y / 2**24 in units of the scale, with y < 7.  By Cauchy's inequality a sum E of n squares is then off by at most
// 70 sqrt(n E) / 2**24 <= (9 n + 140 E) / 2**24, and the order of the sum adds less than n E / 2**21.  The bound is for
// both candidates, with some room; a block has n = 16 `rows` elements.
FN unsigned settle_by_estimates(Scratch& s, int block, int64_t rows) {
  const F error = load<F>(s.encode_of + block), other_error = load<F>(s.decode_of + block);
  const F scale = load<F>(s.stored + block), other_scale = load<F>(s.other_stored + block);
  const F square = other_scale * other_scale;
  const F difference = other_error * square - error * (scale * scale);
  const float n = float(16 * rows);
  const F bound = square * (larger_of(error, other_error) * (0x1p-15f + n * 0x1p-19f) + n * (0x1p-19f / kUnit));
  settle(s, block, difference < -bound);
  return kAllLanes ^ (below(difference, -bound) | below(bound, difference));
}

// Whether estimates hold for kLanes blocks: no scale is 0, and no magnitude becomes 7 or more.
FN bool estimable(const Scratch& s, int block) {
  const F amax = load<F>(s.amax + block);
  const F least = broadcast(0.0f), most = broadcast(7.0f);
  return (below(least, load<F>(s.stored + block)) & below(amax * load<F>(s.encode + block), most) &
          below(amax * load<F>(s.other_encode + block), most)) == kAllLanes;
}

// --- Blocks of 16 columns.  Vectors of four blocks, or of eight where a vector holds two, are transposed within
// quarters of 128 bits.  A lane then has elements of one block alone, and each quarter other columns.

// Blocks that a vector holds, vectors that a block fills, and groups of blocks that are transposed together.
template <class T>
constexpr int kBlocksOf = sizeof(T) == 2 && kLanes == 16 ? 2 : 1;
template <class T>
constexpr int kVectorsOf = std::max(1, 4 * int(sizeof(T)) / kLanes);
template <class T>
constexpr int kGroups = kLanes / 4 / kBlocksOf<T>;

// The factors of a group's lanes.
template <class T>
FN F of_lanes(const float* blocks) {
#if SNIP_LANES == 16
  if constexpr (sizeof(T) == 2) {
    const __m512i block = _mm512_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6, 1, 3, 5, 7, 1, 3, 5, 7);
    return _mm512_permutexvar_ps(block, _mm512_castps256_ps512(load<__m256>(blocks)));
  }
  return _mm512_broadcast_f32x4(load<__m128>(blocks));
#elif SNIP_LANES == 8
  return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(blocks));
#else
  return load<F>(blocks);
#endif
}

// The sums of all groups' quarters, a block in each lane.
template <class T>
FN F sums_of(const F* v) {
#if SNIP_LANES == 16
  const __m512 one = _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
  if constexpr (sizeof(T) == 2)
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15), one);
  const __m512 two = _mm512_add_ps(_mm512_shuffle_f32x4(v[2], v[3], 0x88), _mm512_shuffle_f32x4(v[2], v[3], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(one, two, 0x88), _mm512_shuffle_f32x4(one, two, 0xdd));
#elif SNIP_LANES == 8
  return _mm256_add_ps(_mm256_permute2f128_ps(v[0], v[1], 0x20), _mm256_permute2f128_ps(v[0], v[1], 0x31));
#else
  return v[0];
#endif
}

// The errors of kLanes blocks of 16 columns from x on.
template <class T>
FN void estimate_rows(Scratch& s, int block, const T* x, int64_t stride, int64_t rows) {
  F errors[kGroups<T>], other_errors[kGroups<T>];
#pragma GCC unroll 4
  for (int g = 0; g < kGroups<T>; ++g) {
    const int first = 4 * kBlocksOf<T> * g;
    Estimate e(of_lanes<T>(s.encode + block + first), of_lanes<T>(s.other_encode + block + first));
    for (int64_t i = 0; i < rows; ++i)
#pragma GCC unroll 4
      for (int k = 0; k < kVectorsOf<T>; ++k) {
        F v[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j)
          v[j] = load<F>(x + i * stride + 16 * (first + j * kBlocksOf<T>) + k * (4 * kLanes / int(sizeof(T))));
        const F low[2] = {interleave_words(v[0], v[1], false), interleave_words(v[2], v[3], false)};
        const F high[2] = {interleave_words(v[0], v[1], true), interleave_words(v[2], v[3], true)};
#pragma GCC unroll 2
        for (int second = 0; second < 2; ++second) {
          e.add_all<T>(interleave(as<W>(low[0]), as<W>(low[1]), second));
          e.add_all<T>(interleave(as<W>(high[0]), as<W>(high[1]), second));
        }
      }
    errors[g] = e.error, other_errors[g] = e.other_error;
  }
  keep(s, block, sums_of<T>(errors), sums_of<T>(other_errors));
}

// --- Blocks of one column

// Even and odd words of two vectors, and back.
FN Pair<F> apart(F a, F b) {
#if SNIP_LANES == 16
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
  return {_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b)};
#elif SNIP_LANES == 8
  const __m256i even = as<__m256i>(_mm256_shuffle_ps(a, b, 0x88)), odd = as<__m256i>(_mm256_shuffle_ps(a, b, 0xdd));
  return {as<F>(_mm256_permute4x64_epi64(even, 0xd8)), as<F>(_mm256_permute4x64_epi64(odd, 0xd8))};
#else
  return {F{a[0], a[2], b[0], b[2]}, F{a[1], a[3], b[1], b[3]}};
#endif
}
FN Pair<F> together(F even, F odd) {
  const F low = interleave_words(even, odd, false), high = interleave_words(even, odd, true);
#if SNIP_LANES == 16
  const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), l = as<__m512i>(low), h = as<__m512i>(high);
  const __m512i second = _mm512_or_si512(first, _mm512_set1_epi64(4));
  return {as<F>(_mm512_permutex2var_epi64(l, first, h)), as<F>(_mm512_permutex2var_epi64(l, second, h))};
#elif SNIP_LANES == 8
  return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
#else
  return {low, high};
#endif
}

// The errors of kGroup blocks of one column from x on.
FN void estimate_columns(Scratch& s, int block, const bfloat16* x, int64_t stride, int64_t rows) {
  const Pair<F> encode = apart(load<F>(s.encode + block), load<F>(s.encode + block + kLanes));
  const Pair<F> other = apart(load<F>(s.other_encode + block), load<F>(s.other_encode + block + kLanes));
  Estimate even(encode.a, other.a), odd(encode.b, other.b);
  for (int64_t i = 0; i < rows; ++i) {
    const U both = load<U>(x + i * stride);
    even.add(as<F>((both << 16) & 0x7fffffffu));
    odd.add(as<F>(both & 0x7fff0000u));
  }
  const Pair<F> error = together(even.error, odd.error), other_error = together(even.other_error, odd.other_error);
  keep(s, block, error.a, other_error.a);
  keep(s, block + kLanes, error.b, other_error.b);
}
FN void estimate_columns(Scratch& s, int block, const float* x, int64_t stride, int64_t rows) {
  for (int end = block + kGroup; block < end; block += kLanes, x += kLanes) {
    Estimate e(load<F>(s.encode + block), load<F>(s.other_encode + block));
    for (int64_t i = 0; i < rows; ++i) e.add(as<F>(load<U>(x + i * stride) & 0x7fffffffu));
    keep(s, block, e.error, e.other_error);
  }
}

// Adds the errors of a block's rows by halves.
struct Halves {
  F rows[kMostRows], other_rows[kMostRows];

  FN I take(int64_t rows_of_block, int64_t there) {
    int64_t half = 1;
    while (half < rows_of_block) half *= 2;
    for (int64_t i = there; i < half; ++i) rows[i] = other_rows[i] = F{};
    for (half /= 2; half > 0; half /= 2)
      for (int64_t i = 0; i < half; ++i) rows[i] += rows[i + half], other_rows[i] += other_rows[i + half];
    return other_rows[0] < rows[0];
  }
};

// Settle `count` blocks, at most kLanes, in the specification's order.
template <class T>
SNIP_TARGET __attribute__((noinline)) void settle_exactly(const Form& form, const T* x, int64_t stride, int64_t rows,
                                                          int cols, float whole, Scratch& s, int block, int count) {
  const Rounder r(form.grid, form.stored);
  const int width = form.block_cols;
  const Candidates all = candidates(s, block, whole);
  Halves halves;
  for (int64_t i = 0; i < (width == 1 ? 1 : rows); ++i) {
    Candidates c = all;
    // blocks of one column: along the rows, one after another
    for (int64_t j = 0; j < (width == 1 ? rows : width); ++j) {
      const int64_t first = int64_t(block) * width + (width == 1 ? 0 : j), row = width == 1 ? j : i;
      const int64_t blocks = std::min<int64_t>(count, (cols - first + width - 1) / width);
      c.add(sizes_of<T>(x + row * stride + first, width, blocks), r);
    }
    halves.rows[i] = c.error, halves.other_rows[i] = c.other_error;
  }
  const I there = lanes_below(count);
  settle(s, block, there & halves.take(width == 1 ? 1 : form.block_rows, width == 1 ? 1 : rows));
}

// Settle one block with sides of 1 and 16 in the specification's order, from its first element on.  Its elements are
// lanes here, so that only the additions wait for each other.
template <class T>
SNIP_TARGET __attribute__((noinline)) void settle_one(const Form& form, const T* x, int64_t stride, int64_t rows,
                                                      float whole, Scratch& s, int block) {
  const Rounder r(form.grid, form.stored);
  const int width = form.block_cols, lines = width == 1 ? 1 : int(rows);
  float errors[2][16] = {};
  bool differ = false;
  for (int i = 0; i < lines; ++i) {
    alignas(64) float squares[2][16];
    for (int j = 0; j < 16; j += kLanes) {
      Candidates c = {broadcast(s.encode[block]), broadcast(s.stored[block]), broadcast(s.other_encode[block]),
                      broadcast(s.other_stored[block]), broadcast(whole), F{}, F{}};
      if (width > 1) c.add(row_of_sizes(x + i * stride + j), r);
      else if (j < rows) c.add(sizes_of<T>(x + j * stride, stride, rows - j), r);
      store(squares[0] + j, c.error, false), store(squares[1] + j, c.other_error, false);
      differ |= (below(c.error, c.other_error) | below(c.other_error, c.error)) != 0;
    }
    // most of what estimates leave are tiles whose values are the same under both scales
    if (lines == 1 && !differ) return;
    for (int j = 0; j < 16; ++j) errors[0][i] += squares[0][j], errors[1][i] += squares[1][j];
  }
  for (int half = lines > 1 ? 8 : 0; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) errors[0][i] += errors[0][i + half], errors[1][i] += errors[1][i + half];
  if (errors[1][0] < errors[0][0]) s.encode[block] = s.other_encode[block], s.stored[block] = s.other_stored[block];
}

// Settle the blocks from `first` on by estimates, as far as these hold in a row, and return the first one that is left.
template <class T>
FN int settle_run(const Form& form, const T* x, int64_t stride, int64_t rows, int cols, float whole, Scratch& s,
                  int first) {
  const int width = form.block_cols, step = width == 1 ? kGroup : kLanes;
  int end = first;
  for (; (end + step) * width <= cols && estimable(s, end) && (width > 1 || estimable(s, end + kLanes)); end += step)
    if (width == 1) estimate_columns(s, end, x + end, stride, rows);
    else estimate_rows(s, end, x + end * width, stride, rows);
  // only now, so that estimates need not wait for each other's choices
  for (int b = first; b < end; b += kLanes) {
    unsigned unclear = settle_by_estimates(s, b, width == 1 ? 1 : form.block_rows);
    for (; unclear; unclear &= unclear - 1) {
      const int block = b + __builtin_ctz(unclear);
      settle_one(form, x + block * width, stride, rows, whole, s, block);
    }
  }
  return end;
}

template <class T>
FN void four_over_six(const Form& form, const T* x, int64_t stride, int64_t rows, int cols, float whole, Scratch& s) {
  const int width = form.block_cols, count = (cols + width - 1) / width;
  const bool estimated = is_e2m1(form.grid) && std::max(width, form.block_rows) == 16 && (width == 1 || width == 16);
  for (int b = 0; b < count; b += kLanes) {
    if (estimated) b = settle_run(form, x, stride, rows, cols, whole, s, b);
    if (b < count) settle_exactly(form, x, stride, rows, cols, whole, s, b, std::min(kLanes, count - b));
  }
}
