// Vectors of SNIP_LANES float32, and groups of columns as two of them; included by cpu_kernels.h.
//
// Vectors are the compilers' vector_size types, so that loops over them read like the scalar formulas of cast.py; only
// what compilers do badly is written with intrinsics.  A group of bfloat16 is split into even and odd columns, which
// costs a shift and a mask; a group of float32 is split into halves.

typedef float F __attribute__((vector_size(4 * SNIP_LANES)));
typedef int32_t I __attribute__((vector_size(4 * SNIP_LANES)));
typedef uint32_t U __attribute__((vector_size(4 * SNIP_LANES)));
typedef uint64_t W __attribute__((vector_size(4 * SNIP_LANES)));
typedef int16_t H __attribute__((vector_size(4 * SNIP_LANES)));
typedef uint16_t Half __attribute__((vector_size(2 * SNIP_LANES)));
typedef uint8_t Quarter __attribute__((vector_size(SNIP_LANES)));

using bfloat16 = uint16_t;
constexpr int kLanes = SNIP_LANES, kGroup = 2 * kLanes;

template <class V>
struct Pair {
  V a, b;
};

template <class V>
FN V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class To, class From>
FN To as(From v) {
  static_assert(sizeof(To) == sizeof(From), "same bits");
  To to;
  std::memcpy(&to, &v, sizeof to);
  return to;
}

// Bypasses the caches if `stream` is set; p is then aligned to the vector.
template <class V>
FN void store(void* p, V v, [[maybe_unused]] bool stream) {
#if defined(__x86_64__)
  if (stream) {
#if SNIP_LANES == 16
    if constexpr (sizeof v == 64) return _mm512_stream_si512(static_cast<__m512i*>(p), as<__m512i>(v));
#endif
#if SNIP_LANES >= 8
    if constexpr (sizeof v == 32) return _mm256_stream_si256(static_cast<__m256i*>(p), as<__m256i>(v));
#endif
    if constexpr (sizeof v == 16) return _mm_stream_si128(static_cast<__m128i*>(p), as<__m128i>(v));
  }
#endif
  std::memcpy(p, &v, sizeof v);
}

FN F broadcast(float v) { return F{} + v; }
FN I most(I a, I b) { return a > b ? a : b; }

// The smaller one; NaN where v is NaN.
FN F least(F bound, F v) {
#if SNIP_LANES == 16
  return _mm512_min_ps(bound, v);  // the second operand if they are unordered
#elif SNIP_LANES == 8
  return _mm256_min_ps(bound, v);
#else
  return bound < v ? bound : v;
#endif
}

// The larger one; b if they are unordered.
FN F larger_of(F a, F b) {
#if SNIP_LANES == 16
  return _mm512_max_ps(a, b);
#elif SNIP_LANES == 8
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

// For 0 <= v < 2**31; NaN stays.
FN F floor_of(F v) {
#if SNIP_LANES == 16
  return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#elif SNIP_LANES == 8
  return _mm256_floor_ps(v);
#else
  return v - (v - __builtin_convertvector(__builtin_convertvector(v, I), F));
#endif
}

// Products of the low halves of 64-bit lanes.
FN W multiply(W a, uint32_t b) {
#if SNIP_LANES == 16
  return as<W>(_mm512_mul_epu32(as<__m512i>(a), _mm512_set1_epi64(b)));
#elif SNIP_LANES == 8
  return as<W>(_mm256_mul_epu32(as<__m256i>(a), _mm256_set1_epi64x(b)));
#elif defined(__x86_64__)
  return as<W>(_mm_mul_epu32(as<__m128i>(a), _mm_set1_epi64x(b)));
#else
  return (a & 0xffffffffu) * uint64_t(b);
#endif
}

// The low halves of 64-bit lanes, those of b above those of a.
FN W low_halves(W a, W b) {
#if SNIP_LANES == 16
  return as<W>(_mm512_mask_shuffle_epi32(as<__m512i>(a), 0xaaaa, as<__m512i>(b), _MM_PERM_CCAA));
#else
  return (a & 0xffffffffu) | (b << 32);
#endif
}

// In each 128 bits, the first 64 of a and b, or the second 64.
FN W interleave(W a, W b, bool second) {
#if SNIP_LANES == 16
  const __m512i x = as<__m512i>(a), y = as<__m512i>(b);
  return as<W>(second ? _mm512_unpackhi_epi64(x, y) : _mm512_unpacklo_epi64(x, y));
#elif SNIP_LANES == 8
  const __m256i x = as<__m256i>(a), y = as<__m256i>(b);
  return as<W>(second ? _mm256_unpackhi_epi64(x, y) : _mm256_unpacklo_epi64(x, y));
#else
  return W{a[second], b[second]};
#endif
}

// In each 128 bits, the first two words of a and b interleaved, or the second two.
FN F interleave_words(F a, F b, bool second) {
#if SNIP_LANES == 16
  return second ? _mm512_unpackhi_ps(a, b) : _mm512_unpacklo_ps(a, b);
#elif SNIP_LANES == 8
  return second ? _mm256_unpackhi_ps(a, b) : _mm256_unpacklo_ps(a, b);
#else
  return second ? F{a[2], b[2], a[3], b[3]} : F{a[0], b[0], a[1], b[1]};
#endif
}

// A bit for each lane, set if the lane is true: all ones.
constexpr unsigned kAllLanes = (1u << SNIP_LANES) - 1;
FN unsigned mask_of(I lanes) {
#if SNIP_LANES == 16
  return _mm512_movepi32_mask(as<__m512i>(lanes));
#elif SNIP_LANES == 8
  return unsigned(_mm256_movemask_ps(as<__m256>(lanes)));
#else
  return (lanes[0] & 1) | (lanes[1] & 2) | (lanes[2] & 4) | (lanes[3] & 8);
#endif
}
// A bit for each lane, set if a is below b.
FN unsigned below(F a, F b) {
#if SNIP_LANES == 16
  return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
#else
  return mask_of(a < b);
#endif
}
// True in the first lanes.
FN I lanes_below(int count) {
  I lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = i < count ? -1 : 0;
  return lanes;
}

// --- What depends on the element type of x

// Sizes: magnitudes' bits, as signed integers.
struct Sizes16 {
  using Word = int16_t;
  using Vector = H;
  static constexpr Word kSign = 0x7fff, kInfinity = 0x7f80;
  static constexpr int kShift = 16;
};
struct Sizes32 {
  using Word = int32_t;
  using Vector = I;
  static constexpr Word kSign = 0x7fffffff, kInfinity = 0x7f800000;
  static constexpr int kShift = 0;
};
template <class T>
using Sizes = std::conditional_t<sizeof(T) == 2, Sizes16, Sizes32>;

FN Pair<F> load_pair(const bfloat16* x) {
  const U both = load<U>(x);
  return {as<F>(both << 16), as<F>(both & 0xffff0000u)};
}
FN Pair<F> load_pair(const float* x) { return {load<F>(x), load<F>(x + kLanes)}; }

FN U rounded_high_half(F v) {  // NaN stays NaN: its low half is 0, since x is bfloat16
  const U b = as<U>(v);
  return b + 0x7fffu + ((b >> 16) & 1u);
}
FN void store_pair(bfloat16* out, Pair<F> v, bool stream) {
  store(out, (rounded_high_half(v.a) >> 16) | (rounded_high_half(v.b) & 0xffff0000u), stream);
}
FN void store_pair(float* out, Pair<F> v, bool stream) {
  store(out, v.a, stream);
  store(out + kLanes, v.b, stream);
}

template <class T>
FN void store_codes(uint8_t* out, Pair<U> v, bool stream) {
  if constexpr (sizeof(T) == 2) {
    store(out, __builtin_convertvector(v.a | (v.b << 8), Half), stream);
  } else {
    store(out, __builtin_convertvector(v.a, Quarter), stream);
    store(out + kLanes, __builtin_convertvector(v.b, Quarter), stream);
  }
}

// The 16-bit draws of a group, in bits 7 to 22 of each lane; other bits may be anything.
template <class T>
FN Pair<U> load_draws(const uint16_t* draws) {
  if constexpr (sizeof(T) == 2) {
    const U both = load<U>(draws);
    return {both << 7, both >> 9};
  } else {
    return {__builtin_convertvector(load<Half>(draws), U) << 7,
            __builtin_convertvector(load<Half>(draws + kLanes), U) << 7};
  }
}

template <class T>
FN Pair<U> load_codes(const uint8_t* codes) {
  if constexpr (sizeof(T) == 2) {
    const U both = __builtin_convertvector(load<Half>(codes), U);
    return {both & 0xffu, both >> 8};
  } else {
    return {__builtin_convertvector(load<Quarter>(codes), U),
            __builtin_convertvector(load<Quarter>(codes + kLanes), U)};
  }
}

// One word per column, put into the order of pairs.
template <class T, class Word>
FN void arrange(const Word* from, Word* to, int cols) {
  if constexpr (sizeof(T) == 2) {
    for (int j = 0; j < cols; j += kGroup)
      for (int i = 0; i < kLanes; ++i) {
        to[j + i] = from[j + 2 * i];
        to[j + kLanes + i] = from[j + 2 * i + 1];
      }
  } else {
    std::memcpy(to, from, (cols + kGroup - 1) / kGroup * kGroup * sizeof(Word));
  }
}

// A factor for each element of a group: from one per column in the order of pairs, or from one per 2**shift columns,
// at least 16.
template <class T, bool kUniform>
FN Pair<F> factors(const float* from, int col, int shift) {
  if constexpr (!kUniform) return {load<F>(from + col), load<F>(from + col + kLanes)};
#if SNIP_LANES == 16
  const __m512 first = _mm512_set1_ps(from[col >> shift]), second = _mm512_set1_ps(from[(col + 16) >> shift]);
  if constexpr (sizeof(T) == 4) return {first, second};
  const F halves = _mm512_mask_blend_ps(0xff00, first, second);
  return {halves, halves};
#else
  return {broadcast(from[col >> shift]), broadcast(from[col >> shift])};
#endif
}
