// The casts for one instruction set.  cpu.cpp includes this once for each, in its own namespace, and defines
// SNIP_LANES (float32 in a vector), SNIP_COUNTING (0, 1, ... in the first 64-bit lanes of each 128 bits, then in the
// second ones) and SNIP_TARGET (the functions' attribute).

#include "cpu_vectors.h"

#include "cpu_rounding.h"
#include "cpu_sizes.h"

// Kinds of scale, in the order of format.py's _SCALES.
enum Scale : int32_t { kFp32, kFp32Pow2, kE8m0, kE8m0Ceil, kE4m3, kE4m34over6 };

// What a strip keeps between its steps.  Whole groups are read and written, hence the space beyond kStrip.
struct Scratch {
  alignas(64) float amax[kStrip + 64], encode[kStrip + 64], stored[kStrip + 64], decode[kStrip + 64];
  alignas(64) float other_encode[kStrip + 64], other_stored[kStrip + 64];  // for kE4m34over6
  alignas(64) float encode_of[kStrip + 64], decode_of[kStrip + 64];  // as factors() reads them
  alignas(64) uint16_t draws[kStrip + 256];
  alignas(64) char sizes[4 * kStrip + 64];
};

#include "cpu_four_over_six.h"

// The factor that maps the largest block scale to E4M3's largest, or to 256 under kE4m34over6, which needs 1.5 times as
// much too; and the tensor's scale, which multiplies block scales.
FN float tensor_encode_of(const Form& form, float amax) {
  return std::min((form.scale == kE4m34over6 ? 256.0f : 448.0f) * form.grid.max / amax, kFloatMax);
}
FN float tensor_scale_of(float encode) { return std::min(1.0f / encode, kFloatMax); }

// An E4M3 scale, and the factor that encodes with it under the tensor's scale.
FN void e4m3_scale(float wanted, float tensor_scale, float& stored, float& encode) {
  wanted = std::min(wanted, 448.0f);
  const int32_t exponent = std::max(as<int32_t>(wanted) & 0x7f800000, (127 - 6) << 23);
  const float c = as<float>(exponent + (20 << 23));
  stored = (wanted + c) - c;
  encode = std::min(1.0f / (stored * tensor_scale), kFloatMax);
}

// scales.py's rules, element by element: encode, the scale as stored, and decode.  Under kE4m34over6, both candidates
// and no decode.
FN void block_scales(const Form& form, const float* tensor_amax, int count, Scratch& s) {
  const float max = form.grid.max;
  if (form.scale == kE8m0 || form.scale == kE8m0Ceil) {
    // a mantissa above that of the grid's max carries into the exponent
    const int32_t mantissa = as<int32_t>(max) & 0x7fffff, carry = form.scale == kE8m0 ? 0 : 0x7fffff - mantissa;
    for (int i = 0; i < count; ++i) {
      int32_t exponent = ((as<int32_t>(s.amax[i]) + carry) >> 23) - 127 - form.grid.emax;
      exponent = std::min(std::max(exponent, -127), 126);
      s.encode[i] = as<float>((127 - exponent) << 23);
      s.stored[i] = s.decode[i] = as<float>(exponent > -127 ? (exponent + 127) << 23 : 0x00400000);
    }
  } else if (form.scale == kE4m3) {
    const float tensor_encode = tensor_encode_of(form, *tensor_amax), tensor_scale = tensor_scale_of(tensor_encode);
    const float factor = tensor_encode * (1.0f / max);
    for (int i = 0; i < count; ++i) {
      e4m3_scale(s.amax[i] * factor, tensor_scale, s.stored[i], s.encode[i]);
      s.decode[i] = s.stored[i] * tensor_scale;
    }
  } else if (form.scale == kE4m34over6) {
    const float tensor_encode = tensor_encode_of(form, *tensor_amax), tensor_scale = tensor_scale_of(tensor_encode);
    for (int i = 0; i < count; ++i) {
      const float wanted = s.amax[i] / max * tensor_encode;
      e4m3_scale(wanted, tensor_scale, s.stored[i], s.encode[i]);
      e4m3_scale(wanted * 1.5f, tensor_scale, s.other_stored[i], s.other_encode[i]);
    }
  } else {
    const bool pow2 = form.scale == kFp32Pow2;
    const int32_t kept = pow2 ? 0x7f800000 : -1;
    const float least = pow2 ? 0x1p-126f : 0.0f;  // the mask would turn a subnormal number into 0
    for (int i = 0; i < count; ++i) {
      s.encode[i] = as<float>(as<int32_t>(std::max(least, std::min(max / s.amax[i], kFloatMax))) & kept);
      const float scale = std::min(1.0f / s.encode[i], kFloatMax);
      s.stored[i] = s.decode[i] = s.amax[i] > 0.0f ? scale : 0.0f;
    }
  }
}

// One factor per block of `width` columns, as factors() reads them; in place if they are so already.
template <class T>
FN const float* spread(float* blocks, int width, int shift, int cols, float* natural, float* out) {
  const int step = shift ? width >> shift : width, places = shift ? (cols + (1 << shift) - 1) >> shift : cols;
  const int count = (cols + width - 1) / width;
  for (int i = 0; i < kGroup; ++i) blocks[count + i] = 0.0f;  // read, though not used, by the last group
  if (shift && step == 1) return blocks;
  float* to = shift ? out : natural;
  if (step > 1) {
    int j = 0;
    for (int b = 0; b < count; ++b)
      for (const int end = std::min(places, j + step); j < end; ++j) to[j] = blocks[b];
    for (int i = 0; i < kGroup; ++i) to[j + i] = 0.0f;
    blocks = to;
  }
  if (!shift) arrange<T>(blocks, out, cols);
  return out;
}

// The position of an operand's row in the whole tensor, counted from the form's first row.
FN int64_t place_of(const Form& form, int64_t row) {
  if (form.piece == 0) return row;
  const int64_t number = row / form.piece;
  return number / 2 * form.sequence + (number % 2 ? form.second : form.first) + row % form.piece;
}

// The scales of a strip's blocks: encode, the scale as stored, and decode.
template <class T>
FN void find_scales(const Call& call, const Form& form, const T* x, int64_t row, int64_t rows, int64_t col, int cols,
                    int blocks, Scratch& s) {
  const int width = form.block_cols;
  using Word = typename Sizes<T>::Word;
  Word* sizes = reinterpret_cast<Word*>(s.sizes);
  const T* reduced = x;
  if (form.block_rows > 1 || width == 1) {
    strip_sizes<T>(x, call.cols, rows, cols, sizes);
    reduced = reinterpret_cast<const T*>(sizes);
  }
  if (width == 1)
    for (int j = 0; j < cols; ++j) s.amax[j] = size_as_float<T>(sizes[j]);
  else
    for (int b = block_sizes(reduced, width, cols, s.amax); b < blocks; ++b)
      s.amax[b] = size_as_float<T>(row_size<T>(reduced + b * width, std::min(width, cols - b * width)));
  block_scales(form, call.tensor_amax, blocks, s);
  if (form.scale == kE4m34over6) {
    const float whole = tensor_encode_of(form, *call.tensor_amax), tensor_scale = tensor_scale_of(whole);
    four_over_six<T>(form, x, call.cols, rows, cols, whole, s);
    for (int b = 0; b < blocks; ++b) s.decode[b] = s.stored[b] * tensor_scale;
  }
  if (form.scales) {
    float* out = form.scales + row / form.block_rows * form.scale_row_stride + col / width * form.scale_col_stride;
    for (int b = 0; b < blocks; ++b) out[b * form.scale_col_stride] = s.stored[b];
  }
}

// --- One strip: the rows of a block, at most kStrip columns

template <class T, bool kCodes, bool kStochastic, bool kUniform>
FN int64_t cast_strip(const Call& call, const Form& form, int64_t row, int64_t rows, int64_t col, int cols,
                      int64_t ahead, Scratch& s) {
  const T* x = static_cast<const T*>(call.x) + row * call.cols + col;
  const int width = form.block_cols, blocks = (cols + width - 1) / width;
  if (form.encode) {
    for (int b = 0; b < blocks; ++b) {
      const int64_t place = width > 1 ? row : col + b;
      s.encode[b] = form.encode[place];
      s.decode[b] = form.decode[place];
    }
  } else {
    find_scales<T>(call, form, x, row, rows, col, cols, blocks, s);
  }
  const int shift = kUniform ? __builtin_ctz(unsigned(width)) : 0;
  const float* encode = spread<T>(s.encode, width, shift, cols, s.amax, s.encode_of);
  const float* decode = kCodes ? nullptr : spread<T>(s.decode, width, shift, cols, s.amax, s.decode_of);
  using Line = Row<T, kCodes, kStochastic, kUniform>;
  typename Line::Out* out = static_cast<typename Line::Out*>(form.out) + row * call.cols + col;
  const int64_t pitch = call.cols * sizeof *out;
  const bool stream = call.rows * pitch >= call.stream_bytes && (reinterpret_cast<uintptr_t>(out) | pitch) % 64 == 0;
  const Rounder rounder(form.grid, form.stored);
  I saturated{};
  for (int64_t i = 0; i < rows; ++i) {
    if constexpr (kStochastic)
      random_draws(Philox(form, form.row0 + place_of(form, row + i)), form.col0 + col, cols, s.draws);
    const Line line = {encode, decode, shift, s.draws + ((form.col0 + col) & 7), rounder, ahead};
    line.cast(x + i * call.cols, out + i * call.cols, cols, stream, saturated);
  }
  int64_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += saturated[i];
  return sum;
}

template <class T, bool kCodes, bool kStochastic, bool kUniform>
SNIP_TARGET int64_t cast_range(const Call& call, const Form& form, int64_t row, int64_t last_row, int64_t col,
                               int64_t last_col) {
  Scratch s;
  int64_t saturated = 0;
  const int64_t height = form.block_rows, across = last_col - col;
  const int64_t strip = height > 1 ? tall_strip(form.block_cols) : kStrip / form.block_cols * form.block_cols;
  // What to prefetch: the strip to the right, or as many columns away in the rows below.
  const int64_t below = height > 1 ? 0 : (strip + across - 1) / across * call.cols;
  for (int64_t i = row; i < last_row; i += height)
    for (int64_t j = col; j < last_col; j += strip) {
      const bool more = height > 1 ? j + strip < last_col : across > strip;
      const int64_t ahead = more ? strip : below;
      saturated += cast_strip<T, kCodes, kStochastic, kUniform>(call, form, i, std::min(height, last_row - i), j,
                                                                int(std::min(strip, last_col - j)), ahead, s);
    }
  return saturated;
}

template <class T>
SNIP_TARGET int64_t cast_typed(const Call& call, const Form& form, int64_t row, int64_t last_row, int64_t col,
                               int64_t last_col) {
  using Range = int64_t (*)(const Call&, const Form&, int64_t, int64_t, int64_t, int64_t);
  static constexpr Range ranges[2][2][2] = {
      {{cast_range<T, false, false, false>, cast_range<T, false, false, true>},
       {cast_range<T, false, true, false>, cast_range<T, false, true, true>}},
      {{cast_range<T, true, false, false>, cast_range<T, true, false, true>},
       {cast_range<T, true, true, false>, cast_range<T, true, true, true>}}};
  const bool uniform = form.block_cols % 16 == 0;
  return ranges[form.output == kCodes][form.stochastic != 0][uniform](call, form, row, last_row, col, last_col);
}

SNIP_TARGET int64_t cast(const Call& call, const Form& form, int64_t row, int64_t last_row, int64_t col,
                         int64_t last_col) {
  if (form.tensor_scale && row == 0 && col == 0)
    *form.tensor_scale = tensor_scale_of(tensor_encode_of(form, *call.tensor_amax));
  return call.bfloat16 ? cast_typed<bfloat16>(call, form, row, last_row, col, last_col)
                       : cast_typed<float>(call, form, row, last_row, col, last_col);
}

// --- Decoding, the largest magnitude, plain copy

template <class T, bool kUniform>
FN void decode_row(const uint8_t* codes, T* out, int cols, const float* scales, const Grid& g, bool stream) {
  const int32_t mantissa = g.mantissa_bits, shift = 23 - mantissa;
  const int32_t sign_shift = 31 - __builtin_ctz(unsigned(g.sign_code));
  const int32_t base = (g.emin + 126) << 23;
  const float smallest = as<float>((g.emin + 127) << 23);
  uint8_t padded[kGroup];
  T tail[kGroup];
  for (int j = 0; j < cols; j += kGroup) {
    const bool whole = j + kGroup <= cols;
    if (!whole) {
      std::memset(padded, 0, sizeof padded);
      std::memcpy(padded, codes + j, cols - j);
    }
    const Pair<U> pair = load_codes<T>(whole ? codes + j : padded);
    const Pair<F> scale = factors<T, kUniform>(scales, j, 4);
    Pair<F> values;
    for (int side = 0; side < 2; ++side) {
      const U code = side ? pair.b : pair.a;
      const I size = as<I>(code & ~uint32_t(g.sign_code));
      const I subnormal = size < (1 << mantissa);  // all ones where true
      const F leading = as<F>((size << shift) + base - (subnormal << 23));
      const F value = leading - as<F>(subnormal & as<int32_t>(smallest));
      const U signs = (code & uint32_t(g.sign_code)) << sign_shift;
      const F scaled = as<F>(as<U>(value) | signs) * (side ? scale.b : scale.a);
      (side ? values.b : values.a) = as<F>(size > g.max_code ? I{} + 0x7fc00000 : as<I>(scaled));
    }
    T* at = whole ? out + j : tail;
    store_pair(at, values, stream && whole);
    if (!whole) std::memcpy(out + j, tail, (cols - j) * sizeof(T));
  }
}

template <class T, bool kUniform>
SNIP_TARGET void decode_range(const Decode& call, int64_t row, int64_t last_row, int64_t col, int64_t last_col) {
  Scratch s;
  const int64_t blocks = (call.cols + call.block_cols - 1) / call.block_cols;
  const int cols = int(last_col - col);
  constexpr int kStep = kUniform ? 16 : 1;
  for (int64_t i = row; i < last_row; ++i) {
    if (i == row || i % call.block_rows == 0) {
      const float* scales = call.scales + i / call.block_rows * blocks;
      int64_t b = col / call.block_cols, end = (b + 1) * call.block_cols - col;
      int j = 0;
      for (; j < cols; j += kStep) {
        if (j == end) ++b, end += call.block_cols;
        s.decode[j / kStep] = scales[b];
      }
      for (int k = 0; k < kGroup; ++k) s.decode[j / kStep + k] = 0.0f;  // read, though not used
      if (!kUniform) arrange<T>(s.decode, s.decode_of, cols);
    }
    const int64_t at = i * call.cols + col;
    T* out = static_cast<T*>(call.out) + at;
    const bool stream = call.rows * call.cols * int64_t(sizeof(T)) >= call.stream_bytes &&
                        reinterpret_cast<uintptr_t>(out) % 64 == 0;
    decode_row<T, kUniform>(call.codes + at, out, cols, kUniform ? s.decode : s.decode_of, call.grid, stream);
  }
}

SNIP_TARGET void decode(const Decode& call, int64_t row, int64_t last_row, int64_t col, int64_t last_col) {
  const bool uniform = call.block_cols % 16 == 0;
  if (call.bfloat16 && uniform) decode_range<bfloat16, true>(call, row, last_row, col, last_col);
  else if (call.bfloat16) decode_range<bfloat16, false>(call, row, last_row, col, last_col);
  else if (uniform) decode_range<float, true>(call, row, last_row, col, last_col);
  else decode_range<float, false>(call, row, last_row, col, last_col);
}

template <class T>
FN uint32_t amax_of(const T* x, int64_t count) {
  constexpr int kCols = 8 * sizeof(typename Sizes<T>::Vector) / sizeof(T);
  typename Sizes<T>::Word sizes[kCols], most = 0;
  const int64_t whole = count / kCols;
  column_sizes<T, 8>(x, kCols, whole, sizes);
  for (auto size : sizes) most = std::max(most, size);
  for (int64_t i = whole * kCols; i < count; ++i)
    most = std::max(most, size_of<T>(load<typename Sizes<T>::Word>(x + i)));
  return as<uint32_t>(size_as_float<T>(most));
}

SNIP_TARGET uint32_t amax(const void* x, int64_t count, bool is_bfloat16) {
  return is_bfloat16 ? amax_of(static_cast<const bfloat16*>(x), count) : amax_of(static_cast<const float*>(x), count);
}

SNIP_TARGET void copy(const void* from, void* to, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += sizeof(U))
    store(static_cast<char*>(to) + i, load<U>(static_cast<const char*>(from) + i), true);
}

#include "cpu_adamw.h"

constexpr Kernels kKernels = {cast, decode, amax, copy, adamw};
