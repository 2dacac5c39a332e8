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
  if (count == 1) {
    F one{};
    one[0] = size_as_float<T>(size_of<T>(load<typename Sizes<T>::Word>(x)));
    return one;
  }
  alignas(64) float sizes[kLanes] = {};
  const int lanes = int(std::min<int64_t>(count, kLanes));
  for (int i = 0; i < lanes; ++i)
    sizes[i] = size_as_float<T>(size_of<T>(load<typename Sizes<T>::Word>(x + i * step)));
  return load<F>(sizes);
}

// Magnitudes of kLanes adjacent elements, including those that are not finite.
FN F row_of_sizes(const bfloat16* x) {
  return as<F>((__builtin_convertvector(load<Half>(x), U) & 0x7fffu) << 16);
}
FN F row_of_sizes(const float* x) { return as<F>(load<U>(x) & 0x7fffffffu); }

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
};

// Settle kLanes blocks by their estimated errors, and return a mask of those whose errors nearly agree, which are left
// as they were.
//
// Both ways round the same y.  An element's error here differs from the exact one by five roundings, at most
// 5 y / 2**24 in units of the scale, with y < 7.  By Cauchy's inequality a sum E of n squares is then off by at most
// 70 sqrt(n E) / 2**24, and the order of the sum adds less than n E / 2**21.  The bound is for both candidates,
// squared, with some room; a block has n = 16 `rows` elements.
FN unsigned settle_by_estimates(Scratch& s, int block, F error, F other_error, int64_t rows) {
  const F scale = load<F>(s.stored + block), other_scale = load<F>(s.other_stored + block);
  const F difference = other_error * other_scale * other_scale - error * scale * scale;
  const F larger = error > other_error ? error : other_error, square = other_scale * other_scale;
  const float n = float(rows);
  const F bound = square * square * larger * (n * (0x1p-27f / kUnit) + larger * (n * n * 0x1p-31f));
  const I clear = difference * difference > bound;
  settle(s, block, clear & (difference < 0.0f));
  return mask_of(~clear);
}

// Whether estimates hold for kLanes blocks: no scale is 0, and no magnitude becomes 7 or more.
FN bool estimable(const Scratch& s, int block) {
  const F amax = load<F>(s.amax + block);
  return mask_of((load<F>(s.stored + block) > 0.0f) & (amax * load<F>(s.encode + block) < 7.0f) &
                 (amax * load<F>(s.other_encode + block) < 7.0f)) == kAllLanes;
}

// The sums of kLanes vectors, one in each lane.  v is overwritten.
FN F sums_of(F* v) {
  for (int i = 0; i < kLanes; i += 2) {  // in each 128 bits, the sums of two lanes of both, interleaved
    const F low = interleave_words(v[i], v[i + 1], false), high = interleave_words(v[i], v[i + 1], true);
    v[i / 2] = low + high;
  }
  for (int i = 0; i < kLanes / 2; i += 2)  // in each 128 bits, the sums of four vectors
    v[i / 2] = as<F>(interleave(as<W>(v[i]), as<W>(v[i + 1]), false)) + as<F>(interleave(as<W>(v[i]), as<W>(v[i + 1]), true));
#if SNIP_LANES == 16
  const __m512 one = _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
  const __m512 two = _mm512_add_ps(_mm512_shuffle_f32x4(v[2], v[3], 0x88), _mm512_shuffle_f32x4(v[2], v[3], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(one, two, 0x88), _mm512_shuffle_f32x4(one, two, 0xdd));
#elif SNIP_LANES == 8
  return _mm256_add_ps(_mm256_permute2f128_ps(v[0], v[1], 0x20), _mm256_permute2f128_ps(v[0], v[1], 0x31));
#else
  return v[0];
#endif
}

// ``settle_by_estimates`` for kLanes blocks of 16 columns from x on.
template <class T>
FN unsigned settle_rows(Scratch& s, int block, const T* x, int64_t stride, int64_t rows, int64_t block_rows) {
  F errors[kLanes], other_errors[kLanes];
  for (int b = 0; b < kLanes; ++b) {
    Estimate e(broadcast(s.encode[block + b]), broadcast(s.other_encode[block + b]));
    for (int64_t i = 0; i < rows; ++i) {
      const T* from = x + i * stride + b * 16;
      if constexpr (kLanes == 16) {
        e.add(row_of_sizes(from));
      } else {
#pragma GCC unroll 2
        for (int k = 0; k < 16; k += kGroup) {
          const Pair<F> pair = load_pair(from + k);
          e.add(as<F>(as<U>(pair.a) & 0x7fffffffu));
          e.add(as<F>(as<U>(pair.b) & 0x7fffffffu));
        }
      }
    }
    errors[b] = e.error, other_errors[b] = e.other_error;
  }
  const F error = sums_of(errors), other_error = sums_of(other_errors);
  return settle_by_estimates(s, block, error, other_error, block_rows);
}

#if SNIP_LANES == 16
// Sixteen blocks of 16 bfloat16 numbers -> pairs of columns, a block in each lane; blocks are in the order of kBlocks.
FN void pairs_of_columns(const bfloat16* x, __m512i* pairs) {
  __m512i v[8], low[4], four[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) v[i] = _mm512_and_si512(load<__m512i>(x + i * kGroup), _mm512_set1_epi16(0x7fff));
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m512i* from = v + 4 * i;
    low[0] = _mm512_unpacklo_epi32(from[0], from[1]), low[1] = _mm512_unpackhi_epi32(from[0], from[1]);
    low[2] = _mm512_unpacklo_epi32(from[2], from[3]), low[3] = _mm512_unpackhi_epi32(from[2], from[3]);
    for (int k = 0; k < 2; ++k) {
      four[4 * i + 2 * k] = _mm512_unpacklo_epi64(low[k], low[k + 2]);
      four[4 * i + 2 * k + 1] = _mm512_unpackhi_epi64(low[k], low[k + 2]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // quarters of v alternate between columns 0 to 7 and 8 to 15
    pairs[i] = _mm512_shuffle_i32x4(four[i], four[4 + i], 0x88);
    pairs[4 + i] = _mm512_shuffle_i32x4(four[i], four[4 + i], 0xdd);
  }
}

// The block of each lane, and the lane of each block.
alignas(64) constexpr int32_t kBlocks[16] = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
alignas(64) constexpr int32_t kLaneOf[16] = {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15};

FN F in_blocks(F v) { return _mm512_permutexvar_ps(load<__m512i>(kLaneOf), v); }
FN F in_lanes(F v) { return _mm512_permutexvar_ps(load<__m512i>(kBlocks), v); }

// For bfloat16, one shuffle gives two columns, so blocks in lanes are faster than elements in lanes.
FN unsigned settle_rows(Scratch& s, int block, const bfloat16* x, int64_t stride, int64_t rows, int64_t block_rows) {
  Estimate e(in_lanes(load<F>(s.encode + block)), in_lanes(load<F>(s.other_encode + block)));
  for (int64_t i = 0; i < rows; ++i) {
    __m512i pairs[8];
    pairs_of_columns(x + i * stride, pairs);
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
      e.add(as<F>(as<U>(pairs[k]) << 16));
      e.add(as<F>(as<U>(pairs[k]) & 0xffff0000u));
    }
  }
  return settle_by_estimates(s, block, in_blocks(e.error), in_blocks(e.other_error), block_rows);
}
#endif

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
      c.add(sizes_of<T>(x + row * stride + first, width, std::min<int64_t>(count, (cols - first + width - 1) / width)), r);
    }
    halves.rows[i] = c.error, halves.other_rows[i] = c.other_error;
  }
  const I there = lanes_below(count);
  settle(s, block, there & halves.take(width == 1 ? 1 : form.block_rows, width == 1 ? 1 : rows));
}

template <class T>
FN void four_over_six(const Form& form, const T* x, int64_t stride, int64_t rows, int cols, float whole, Scratch& s) {
  const int width = form.block_cols, count = (cols + width - 1) / width;
  const bool estimated = is_e2m1(form.grid) && std::max(width, form.block_rows) == 16 && (width == 1 || width == 16);
  for (int b = 0; b < count; b += kLanes) {
    if (!estimated || (b + kLanes) * width > cols || !estimable(s, b)) {
      settle_exactly(form, x, stride, rows, cols, whole, s, b, std::min(kLanes, count - b));
      continue;
    }
    unsigned unclear;
    if (width == 1) {
      Estimate e(load<F>(s.encode + b), load<F>(s.other_encode + b));
      for (int64_t i = 0; i < rows; ++i) e.add(row_of_sizes(x + i * stride + b));
      unclear = settle_by_estimates(s, b, e.error, e.other_error, 1);
    } else {
      unclear = settle_rows(s, b, x + b * width, stride, rows, form.block_rows);
    }
    for (; unclear; unclear &= unclear - 1)
      settle_exactly(form, x, stride, rows, cols, whole, s, b + __builtin_ctz(unclear), 1);
  }
}
