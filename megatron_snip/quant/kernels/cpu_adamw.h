// Vectorised AdamW on BF16 weights (quant/adamw/step.py); included by cpu_kernels.h.
//
// Every operation is float32 without contraction, and is rounded to BF16 where the specification does.  two_sum rounds
// only the sum, because the other operations are exact either way: if the exponents of a and b are less than 15 apart,
// all numbers are multiples of the smaller ulp and fit 24 bits; else x is a or b, and e is the other one.

FN F to_bf16(F v) { return as<F>(rounded_high_half(v) & 0xffff0000u); }

FN Pair<F> two_sum(F a, F b) {
  const F x = to_bf16(a + b), t = x - a;
  return {x, (a - (x - t)) + (b - t)};
}

FN Pair<F> grow(Pair<F> to, F a) {
  const Pair<F> s = two_sum(to.a, a);
  return two_sum(s.a, to_bf16(to.b + s.b));
}

FN Pair<F> decayed(Pair<F> x, float high, float low, F a) {
  const F p = x.a * high, y = to_bf16(p);
  const Pair<F> s = two_sum(y, a);
  return two_sum(s.a, to_bf16(s.b + ((p - y) + (x.a * low + x.b * high))));
}

FN F square_root(F v) {
#if SNIP_LANES == 16
  return _mm512_sqrt_ps(v);
#elif SNIP_LANES == 8
  return _mm256_sqrt_ps(v);
#elif defined(__x86_64__)
  return _mm_sqrt_ps(v);
#else
  F out;
  for (int i = 0; i < kLanes; ++i) out[i] = __builtin_sqrtf(v[i]);
  return out;
#endif
}

// Where a tensor's part is read and written, or a copy of its last, incomplete group.
struct Pointers {
  bfloat16 *weight, *m, *v, *weight_low, *v_low;
  const bfloat16* grad;
};

FN void store_exact(bfloat16* out, Pair<F> v) { store(out, (as<U>(v.a) >> 16) | as<U>(v.b), false); }

template <bool kVLow>
FN void moments(const Pointers& at, int i, const AdamW& s) {
  Pair<F> g = load_pair(at.grad + i), m = load_pair(at.m + i), v = load_pair(at.v + i), low{};
  if constexpr (kVLow) low = load_pair(at.v_low + i);
  const auto step = [&](F g, F& m, F& v, [[maybe_unused]] F& low) SNIP_TARGET {
    g = g * s.clip;
    m = to_bf16(m * s.beta1 + g * s.rest1);
    const F square = (g * g) * s.rest2;
    if constexpr (kVLow) {
      const Pair<F> sum = decayed({v, low}, s.beta2_high, s.beta2_low, to_bf16(square));
      v = sum.a, low = sum.b;
    } else {
      v = to_bf16(v * s.beta2 + square);
    }
  };
  step(g.a, m.a, v.a, low.a);
  step(g.b, m.b, v.b, low.b);
  store_exact(at.m + i, m);
  store_exact(at.v + i, v);
  if constexpr (kVLow) store_exact(at.v_low + i, low);
}

FN F update(F w, F m, F v, const AdamW& s) {
  return to_bf16((m / (square_root(v) * s.correction + s.eps)) * s.rate - w * s.decay);
}

template <bool kWeightLow, bool kStochastic>
FN void weights(const Pointers& at, int i, Pair<F> u, [[maybe_unused]] const uint16_t* draws) {
  Pair<F> w = load_pair(at.weight + i);
  if constexpr (kWeightLow) {
    const Pair<F> low = load_pair(at.weight_low + i);
    const Pair<F> even = grow({w.a, low.a}, u.a), odd = grow({w.b, low.b}, u.b);
    store_exact(at.weight + i, {even.a, odd.a});
    store_exact(at.weight_low + i, {even.b, odd.b});
  } else if constexpr (kStochastic) {
    const auto moved = [](F w, F u, U draws) SNIP_TARGET {
      const U sum = as<U>(w + u);  // infinity and NaN stay
      return as<F>(((sum & 0x7f800000u) == 0x7f800000u ? sum : sum + draws) & 0xffff0000u);
    };
    const U both = load<U>(draws + i);
    store_exact(at.weight + i, {moved(w.a, u.a, both & 0xffffu), moved(w.b, u.b, both >> 16)});
  } else {
    store_exact(at.weight + i, {to_bf16(w.a + u.a), to_bf16(w.b + u.b)});
  }
}

// Groups per part.  A part goes through three loops, whose chains of dependent operations are short enough for a CPU to
// overlap many groups; the part's numbers stay in the L1 cache.
constexpr int kGroupsPerPart = 16;

template <bool kWeightLow, bool kVLow, bool kStochastic>
FN void adamw_part(const Pointers& at, const uint16_t* draws, int groups, const AdamW& s) {
  Pair<F> u[kGroupsPerPart];
  for (int i = 0; i < groups; ++i) moments<kVLow>(at, i * kGroup, s);
  for (int i = 0; i < groups; ++i) {
    const int k = i * kGroup;
    const Pair<F> w = load_pair(at.weight + k), m = load_pair(at.m + k), v = load_pair(at.v + k);
    u[i] = {update(w.a, m.a, v.a, s), update(w.b, m.b, v.b, s)};
  }
  for (int i = 0; i < groups; ++i) weights<kWeightLow, kStochastic>(at, i * kGroup, u[i], draws);
}

template <bool kWeightLow, bool kVLow, bool kStochastic>
SNIP_TARGET void adamw_range(const AdamW& s, int64_t row, int64_t last_row, int64_t col, int64_t last_col) {
  alignas(64) uint16_t draws[kStrip + 256];
  Form key{};
  key.key0 = s.key0, key.key1 = s.key1, key.iteration = s.iteration;
  for (int64_t i = row; i < last_row; ++i) {
    for (int64_t j = col; j < last_col; j += kStrip) {
      const int64_t from = i * s.cols + j;
      const int cols = int(std::min<int64_t>(kStrip, last_col - j)), skip = int((s.col0 + j) & 7);
      if constexpr (kStochastic) random_draws(Philox(key, s.row0 + i), s.col0 + j, cols, draws);
      int k = 0;
      while (k + kGroup <= cols) {
        const int64_t t = from + k;
        const int groups = std::min((cols - k) / kGroup, kGroupsPerPart);
        adamw_part<kWeightLow, kVLow, kStochastic>(
            {s.weight + t, s.m + t, s.v + t, s.weight_low + t, s.v_low + t, s.grad + t}, draws + skip + k, groups, s);
        k += groups * kGroup;
      }
      if (k == cols) continue;
      bfloat16 rest[6][kGroup] = {};
      const size_t bytes = (cols - k) * sizeof(bfloat16);
      bfloat16* const tensors[6] = {s.weight, s.m, s.v, s.weight_low, s.v_low, const_cast<bfloat16*>(s.grad)};
      for (int t = 0; t < 6; ++t)
        if (tensors[t]) std::memcpy(rest[t], tensors[t] + from + k, bytes);
      adamw_part<kWeightLow, kVLow, kStochastic>({rest[0], rest[1], rest[2], rest[3], rest[4], rest[5]},
                                                 draws + skip + k, 1, s);
      for (int t = 0; t < 5; ++t)
        if (tensors[t]) std::memcpy(tensors[t] + from + k, rest[t], bytes);
    }
  }
}

SNIP_TARGET void adamw(const AdamW& s, int64_t row, int64_t last_row, int64_t col, int64_t last_col) {
  if (s.weight_low && s.v_low) adamw_range<true, true, false>(s, row, last_row, col, last_col);
  else if (s.weight_low) adamw_range<true, false, false>(s, row, last_row, col, last_col);
  else if (s.stochastic) adamw_range<false, false, true>(s, row, last_row, col, last_col);
  else adamw_range<false, false, false>(s, row, last_row, col, last_col);
}
