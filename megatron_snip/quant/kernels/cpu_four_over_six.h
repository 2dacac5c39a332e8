// Which of two scales a block takes under kE4m34over6 (scales.py's four_over_six); included by cpu_kernels.h.
//
// A lane is a block, or a block's part: errors are added one after another, as in the specification.

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

// Put the other candidate in place where its error is smaller: all ones in `take`.
FN void settle(Scratch& s, int block, I take) {
  store(s.encode + block, take ? load<F>(s.other_encode + block) : load<F>(s.encode + block), false);
  store(s.stored + block, take ? load<F>(s.other_stored + block) : load<F>(s.stored + block), false);
}

FN bool is_e2m1(const Grid& g) { return g.mantissa_bits == 1 && g.emin == 0 && g.max == 6.0f; }

// Magnitudes of kLanes elements, `step` apart, of which `count` exist; 0 where one is not finite.
template <class T>
FN F sizes_of(const T* x, int64_t step, int64_t count) {
  alignas(64) float sizes[kLanes] = {};
  const int lanes = int(std::min<int64_t>(count, kLanes));
#if SNIP_LANES == 16
  if constexpr (sizeof(T) == 2) {
    if (step == 1 && lanes == kLanes) {
      const U bits = (__builtin_convertvector(load<Half>(x), U) & 0x7fffu) << 16;
      return as<F>(bits < 0x7f800000u ? bits : U{});
    }
  }
#endif
  for (int i = 0; i < lanes; ++i)
    sizes[i] = size_as_float<T>(size_of<T>(load<typename Sizes<T>::Word>(x + i * step)));
  return load<F>(sizes);
}

#if SNIP_LANES == 16
// Sixteen blocks of 16 bfloat16 numbers -> pairs of columns, a block in each lane; blocks are in the order of kBlocks.
// Elements that are not finite become 0.
FN void pairs_of_columns(const bfloat16* x, __m512i* pairs) {
  __m512i v[8], low[4], four[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    v[i] = _mm512_and_si512(load<__m512i>(x + i * kGroup), _mm512_set1_epi16(0x7fff));
    v[i] = _mm512_maskz_mov_epi16(_mm512_cmplt_epu16_mask(v[i], _mm512_set1_epi16(0x7f80)), v[i]);
  }
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
  for (int i = 0; i < 4; ++i) {  // quarters of v hold columns 0 to 7 or 8 to 15, in turns
    pairs[i] = _mm512_shuffle_i32x4(four[i], four[4 + i], 0x88);
    pairs[4 + i] = _mm512_shuffle_i32x4(four[i], four[4 + i], 0xdd);
  }
}

// The block of each lane, and the lane of each block.
alignas(64) constexpr int32_t kBlocks[16] = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
alignas(64) constexpr int32_t kLaneOf[16] = {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15};

FN F in_blocks(F v) { return _mm512_permutexvar_ps(load<__m512i>(kLaneOf), v); }
FN F in_lanes(F v) { return _mm512_permutexvar_ps(load<__m512i>(kBlocks), v); }

// E2M1 numbers to nearest of magnitudes below 8, by the last three bits of the exponent and the first two of the
// mantissa.  Ties go to either side, which is as far.
alignas(64) constexpr float kNearest[32] = {2, 3, 3, 4, 4, 6, 6, 6, 6, 6,  6,  6,  6, 6,   6,   6,
                                            0, 0, 0, 0, .5, .5, .5, .5, .5, .5, 1, 1, 1, 1.5, 1.5, 2};

// Both candidates of 16 blocks of E2M1 in half the instructions; errors are in units of each scale.  They tell which is
// smaller except where they nearly agree.
struct Estimate {
  __m512 encode, other_encode, error, other_error;

  FN static __m512 squared(__m512 size, __m512 encode, __m512 sum) {
    const __m512 y = _mm512_mul_ps(size, encode);
    const __m512i at = _mm512_srli_epi32(_mm512_castps_si512(_mm512_max_ps(y, _mm512_set1_ps(0.125f))), 21);
    const __m512 error =
        _mm512_sub_ps(_mm512_permutex2var_ps(_mm512_load_ps(kNearest), at, _mm512_load_ps(kNearest + 16)), y);
    return _mm512_fmadd_ps(error, error, sum);
  }

  FN void add(F size) {
    error = squared(size, encode, error);
    other_error = squared(size, other_encode, other_error);
  }
};

// Settle 16 blocks by their estimated errors and return true, or return false where these nearly agree.  The sums here
// and of the exact way differ by less than 2**-12 of the larger scale's square for 16 elements, of which there are
// `rows`: each is off by less than 12 * 2**-22 squares.
FN bool settled(Scratch& s, int block, F error, F other_error, int64_t rows) {
  const F scale = load<F>(s.stored + block), other_scale = load<F>(s.other_stored + block);
  const F difference = other_error * other_scale * other_scale - error * scale * scale;
  const F apart = as<F>(as<I>(difference) & 0x7fffffff), bound = other_scale * other_scale * (float(rows) * 0x1p-12f);
  const I clear = apart > bound;
  if (_mm512_movepi32_mask(as<__m512i>(clear)) != 0xffff) return false;
  settle(s, block, difference < 0.0f);
  return true;
}

// Whether estimates hold for 16 blocks: no scale is 0, and no magnitude becomes 7 or more.
FN bool estimable(const Scratch& s, int block) {
  const F amax = load<F>(s.amax + block);
  const I fits = (load<F>(s.stored + block) > 0.0f) & (amax * load<F>(s.encode + block) < 7.0f) &
                 (amax * load<F>(s.other_encode + block) < 7.0f);
  return _mm512_movepi32_mask(as<__m512i>(fits)) == 0xffff;
}
#endif

// The errors of the rows of a block are added by halves.
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

template <class T>
FN void four_over_six(const Form& form, const T* x, int64_t stride, int64_t rows, int cols, float whole, Scratch& s) {
  const Rounder r(form.grid, form.stored);
  const int width = form.block_cols, count = (cols + width - 1) / width;
  [[maybe_unused]] const bool estimated = is_e2m1(form.grid) && std::max(width, form.block_rows) == 16;
  if (width == 1) {  // along the rows one after another
    for (int j = 0; j < cols; j += kLanes) {
#if SNIP_LANES == 16
      if (estimated && j + kLanes <= cols && estimable(s, j)) {
        Estimate e = {load<F>(s.encode + j), load<F>(s.other_encode + j), F{}, F{}};
        for (int64_t i = 0; i < rows; ++i) e.add(sizes_of<T>(x + i * stride + j, 1, kLanes));
        if (settled(s, j, e.error, e.other_error, 1)) continue;
      }
#endif
      Candidates c = candidates(s, j, whole);
      for (int64_t i = 0; i < rows; ++i) c.add(sizes_of<T>(x + i * stride + j, 1, cols - j), r);
      settle(s, j, c.other_error < c.error);
    }
    return;
  }
  Halves halves;
  int b = 0;
#if SNIP_LANES == 16
  if constexpr (sizeof(T) == 2) {
    for (; width == 16 && (b + kLanes) * width <= cols; b += kLanes) {
      if (estimated && estimable(s, b)) {
        Estimate e = {in_lanes(load<F>(s.encode + b)), in_lanes(load<F>(s.other_encode + b)), F{}, F{}};
        for (int64_t i = 0; i < rows; ++i) {
          __m512i pairs[8];
          pairs_of_columns(x + i * stride + b * width, pairs);
#pragma GCC unroll 8
          for (int k = 0; k < 8; ++k) {
            e.add(as<F>(as<U>(pairs[k]) << 16));
            e.add(as<F>(as<U>(pairs[k]) & 0xffff0000u));
          }
        }
        if (settled(s, b, in_blocks(e.error), in_blocks(e.other_error), form.block_rows)) continue;
      }
      Candidates all = candidates(s, b, whole);
      for (F* factor : {&all.encode, &all.scale, &all.other_encode, &all.other_scale}) *factor = in_lanes(*factor);
      for (int64_t i = 0; i < rows; ++i) {
        Candidates c = all;
        __m512i pairs[8];
        pairs_of_columns(x + i * stride + b * width, pairs);
#pragma GCC unroll 8
        for (int k = 0; k < 8; ++k) {
          c.add(as<F>(as<U>(pairs[k]) << 16), r);
          c.add(as<F>(as<U>(pairs[k]) & 0xffff0000u), r);
        }
        halves.rows[i] = c.error, halves.other_rows[i] = c.other_error;
      }
      const __m512i take = as<__m512i>(halves.take(form.block_rows, rows));
      settle(s, b, as<I>(_mm512_permutexvar_epi32(load<__m512i>(kLaneOf), take)));
    }
  }
#endif
  for (; b < count; b += kLanes) {
    const Candidates all = candidates(s, b, whole);
    for (int64_t i = 0; i < rows; ++i) {
      Candidates c = all;
      for (int j = 0; j < width; ++j) {
        const int64_t first = int64_t(b) * width + j;
        c.add(sizes_of<T>(x + i * stride + first, width, (cols - first + width - 1) / width), r);
      }
      halves.rows[i] = c.error, halves.other_rows[i] = c.other_error;
    }
    settle(s, b, halves.take(form.block_rows, rows));
  }
}
