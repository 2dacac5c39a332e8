// Largest magnitudes of columns, rows and blocks; included by cpu_kernels.h.
//
// Sizes are magnitudes' bits, 0 for infinities and NaN: as integers they order like the values.

template <class T>
FN float size_as_float(typename Sizes<T>::Word bits) {
  return as<float>(uint32_t(bits) << Sizes<T>::kShift);
}

template <class T>
FN typename Sizes<T>::Word size_of(typename Sizes<T>::Word bits) {
  bits = typename Sizes<T>::Word(bits & Sizes<T>::kSign);
  return bits < Sizes<T>::kInfinity ? bits : 0;
}

template <class T>
FN typename Sizes<T>::Vector larger_sizes(typename Sizes<T>::Vector most, const T* x) {
  using V = typename Sizes<T>::Vector;
  V v = load<V>(x) & Sizes<T>::kSign;
  v = v < Sizes<T>::kInfinity ? v : V{};
  return most > v ? most : v;
}

// kWidth vectors of columns at once, so that their maxima stay in registers.
template <class T, int kWidth>
FN void column_sizes(const T* x, int64_t stride, int64_t rows, typename Sizes<T>::Word* out) {
  using V = typename Sizes<T>::Vector;
  constexpr int kCols = sizeof(V) / sizeof(T);
  V most[kWidth] = {};
  for (int64_t i = 0; i < rows; ++i)
#pragma GCC unroll 8
    for (int k = 0; k < kWidth; ++k) most[k] = larger_sizes<T>(most[k], x + i * stride + k * kCols);
  std::memcpy(out, most, sizeof most);
}

// Largest size of each column of a strip.
template <class T>
FN void strip_sizes(const T* x, int64_t stride, int64_t rows, int cols, typename Sizes<T>::Word* out) {
  using Word = typename Sizes<T>::Word;
  constexpr int kCols = sizeof(typename Sizes<T>::Vector) / sizeof(T);
  int j = 0;
  for (; j + 8 * kCols <= cols; j += 8 * kCols) column_sizes<T, 8>(x + j, stride, rows, out + j);
  for (; j + kCols <= cols; j += kCols) column_sizes<T, 1>(x + j, stride, rows, out + j);
  for (; j < cols; ++j) {
    Word most = 0;
    for (int64_t i = 0; i < rows; ++i) most = std::max(most, size_of<T>(load<Word>(x + i * stride + j)));
    out[j] = most;
  }
}

// Largest size of some words of a row; they may be sizes already.
template <class T>
FN typename Sizes<T>::Word row_size(const T* x, int cols) {
  using Word = typename Sizes<T>::Word;
  Word most = 0;
#if SNIP_LANES >= 8
  if constexpr (sizeof(T) == 2) {
    if (cols % 16 == 0) {
      H wide{};
      int j = 0;
      for (; j + kGroup <= cols; j += kGroup) wide = larger_sizes<T>(wide, x + j);
#if SNIP_LANES == 16
      const __m512i both = as<__m512i>(wide);
      __m256i half = _mm256_max_epi16(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
      if (j < cols) {
        const __m256i v = _mm256_and_si256(load<__m256i>(x + j), _mm256_set1_epi16(0x7fff));
        half = _mm256_max_epi16(half, _mm256_and_si256(v, _mm256_cmpgt_epi16(_mm256_set1_epi16(0x7f80), v)));
      }
#else
      const __m256i half = as<__m256i>(wide);
#endif
      const __m128i eight = _mm_max_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
      // minpos finds the smallest of eight words
      const __m128i least = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(0x7fff)));
      return Word(0x7fff ^ _mm_cvtsi128_si32(least));
    }
  }
#endif
  for (int j = 0; j < cols; ++j) most = std::max(most, size_of<T>(load<Word>(x + j)));
  return most;
}

#if SNIP_LANES == 16
// The larger of two vectors' words, so that each word stands for one more place of its block.
FN __m512i larger(__m512i a, __m512i b) { return _mm512_max_epu16(a, b); }

// Largest size of each of eight vectors, or of each half of them: a tree that halves all at once.  Infinities and
// NaN count; the caller checks for them.
template <bool kHalves>
FN void sizes_of_eight(const __m512i* v, float* out) {
  __m512i pairs[4], fours[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    pairs[i] = larger(_mm512_unpacklo_epi16(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_epi16(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 2; ++i)
    fours[i] = larger(_mm512_unpacklo_epi32(pairs[2 * i], pairs[2 * i + 1]),
                      _mm512_unpackhi_epi32(pairs[2 * i], pairs[2 * i + 1]));
  __m512i all = larger(_mm512_unpacklo_epi64(fours[0], fours[1]), _mm512_unpackhi_epi64(fours[0], fours[1]));
  all = larger(all, _mm512_shuffle_i32x4(all, all, 0xb1));  // neighbouring quarters
  const __m128i low = _mm512_castsi512_si128(all), high = _mm512_extracti32x4_epi32(all, 2);
  if constexpr (kHalves) {
    const __m256i both = _mm256_set_m128i(_mm_unpackhi_epi16(low, high), _mm_unpacklo_epi16(low, high));
    _mm512_storeu_si512(out, _mm512_slli_epi32(_mm512_cvtepu16_epi32(both), 16));
  } else {
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_max_epu16(low, high)), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bits);
  }
}
#endif

// Largest size of each block of `width` columns of a row; returns how many blocks are done, from the first one on.
template <class T>
FN int block_sizes([[maybe_unused]] const T* x, [[maybe_unused]] int width, [[maybe_unused]] int cols,
                   [[maybe_unused]] float* out) {
#if SNIP_LANES == 16
  if constexpr (sizeof(T) == 2) {
    const bool halves = width == 16;
    if (!halves && width % kGroup) return 0;
    const int step = halves ? 16 : 8, vectors = halves ? 1 : width / kGroup;
    int b = 0;
    for (; (b + step) * width <= cols; b += step) {
      const __m512i sign = _mm512_set1_epi16(0x7fff);
      __m512i v[8], most = _mm512_setzero_si512();
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        const T* from = x + b * width + i * vectors * kGroup;
        v[i] = _mm512_and_si512(load<__m512i>(from), sign);
        for (int k = 1; k < vectors; ++k) v[i] = larger(v[i], _mm512_and_si512(load<__m512i>(from + k * kGroup), sign));
        most = larger(most, v[i]);
      }
      if (_mm512_cmpge_epu16_mask(most, _mm512_set1_epi16(0x7f80))) return b;  // one by one from here on
      if (halves) sizes_of_eight<true>(v, out + b);
      else sizes_of_eight<false>(v, out + b);
    }
    return b;
  }
#endif
  return 0;
}
