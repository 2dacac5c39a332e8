// AdamW on BF16 weights (quant/adamw/step.py), by vectors; included by cpu_kernels.h.
//
// Every operation is float32 without contraction, and is rounded to BF16 where the specification does; in two_sum only
// the sum is, as the other operations are exact either way: where the exponents of a and b are less than 15 apart, all
// numbers are multiples of the smaller ulp and fit 24 bits; else x is a or b, and e is the other one.

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

// Weight and v with their low parts, and m, of one vector.
struct Elements {
  Pair<F> weight, v;
  F m;
};

template <bool kWeightLow, bool kVLow, bool kStochastic>
FN void adamw_lanes(Elements& x, F g, U draws, const AdamW& s) {
  const F w = x.weight.a;
  g = g * s.clip;
  const F m = to_bf16(x.m * s.beta1 + g * s.rest1), square = (g * g) * s.rest2;
  if constexpr (kVLow) x.v = decayed(x.v, s.beta2_high, s.beta2_low, to_bf16(square));
  else x.v.a = to_bf16(x.v.a * s.beta2 + square);
  x.m = m;
  const F u = to_bf16((m / (square_root(x.v.a) * s.correction + s.eps)) * s.rate - w * s.decay);
  if constexpr (kWeightLow) {
    x.weight = grow(x.weight, u);
  } else if constexpr (kStochastic) {
    const U sum = as<U>(w + u);
    const U moved = (sum & 0x7f800000u) == 0x7f800000u ? sum : sum + draws;  // infinity and NaN stay
    x.weight.a = as<F>(moved & 0xffff0000u);
  } else {
    x.weight.a = to_bf16(w + u);
  }
}

// Where a tensor's part is read and written, or a copy of its last, incomplete group.
struct Pointers {
  bfloat16 *weight, *m, *v, *weight_low, *v_low;
  const bfloat16* grad;
};

template <bool kWeightLow, bool kVLow, bool kStochastic>
FN void adamw_group(const Pointers& at, const uint16_t* draws, const AdamW& s) {
  const Pair<F> g = load_pair(at.grad), w = load_pair(at.weight), m = load_pair(at.m), v = load_pair(at.v);
  Pair<F> w_low{}, v_low{};
  Pair<U> drawn{};
  if constexpr (kWeightLow) w_low = load_pair(at.weight_low);
  if constexpr (kVLow) v_low = load_pair(at.v_low);
  if constexpr (kStochastic) {
    const U both = load<U>(draws);
    drawn = {both & 0xffffu, both >> 16};
  }
  Elements even{{w.a, w_low.a}, {v.a, v_low.a}, m.a}, odd{{w.b, w_low.b}, {v.b, v_low.b}, m.b};
  adamw_lanes<kWeightLow, kVLow, kStochastic>(even, g.a, drawn.a, s);
  adamw_lanes<kWeightLow, kVLow, kStochastic>(odd, g.b, drawn.b, s);
  const auto write = [](bfloat16* out, F a, F b) SNIP_TARGET {
    store(out, (as<U>(a) >> 16) | (as<U>(b) & 0xffff0000u), false);  // low parts, too, are BF16 numbers
  };
  write(at.weight, even.weight.a, odd.weight.a);
  write(at.m, even.m, odd.m);
  write(at.v, even.v.a, odd.v.a);
  if constexpr (kWeightLow) write(at.weight_low, even.weight.b, odd.weight.b);
  if constexpr (kVLow) write(at.v_low, even.v.b, odd.v.b);
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
      const Pointers first{s.weight + from, s.m + from, s.v + from, s.weight_low + from, s.v_low + from, s.grad + from};
      int k = 0;
      for (; k + kGroup <= cols; k += kGroup) {
        const Pointers at{first.weight + k, first.m + k, first.v + k, first.weight_low + k, first.v_low + k,
                          first.grad + k};
        adamw_group<kWeightLow, kVLow, kStochastic>(at, draws + skip + k, s);
      }
      if (k == cols) continue;
      bfloat16 rest[6][kGroup] = {};
      const size_t bytes = (cols - k) * sizeof(bfloat16);
      bfloat16* const tensors[6] = {first.weight, first.m, first.v, first.weight_low, first.v_low,
                                    const_cast<bfloat16*>(first.grad)};
      const bool there[6] = {true, true, true, kWeightLow, kVLow, true};
      for (int t = 0; t < 6; ++t)
        if (there[t]) std::memcpy(rest[t], tensors[t] + k, bytes);
      adamw_group<kWeightLow, kVLow, kStochastic>({rest[0], rest[1], rest[2], rest[3], rest[4], rest[5]},
                                                  draws + skip + k, s);
      for (int t = 0; t < 5; ++t)
        if (there[t]) std::memcpy(tensors[t] + k, rest[t], bytes);
    }
  }
}

SNIP_TARGET void adamw(const AdamW& s, int64_t row, int64_t last_row, int64_t col, int64_t last_col) {
  if (s.weight_low && s.v_low) adamw_range<true, true, false>(s, row, last_row, col, last_col);
  else if (s.weight_low) adamw_range<true, false, false>(s, row, last_row, col, last_col);
  else if (s.stochastic) adamw_range<false, false, true>(s, row, last_row, col, last_col);
  else adamw_range<false, false, false>(s, row, last_row, col, last_col);
}
