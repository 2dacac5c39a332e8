// Shared by cpu.cpp and cpu_kernels.h: the calls as cpu.py lays them out, and the kernels of one instruction set.

#pragma once

#include <algorithm>
#include <cstdint>

namespace megatron_snip {

enum Output : int32_t { kValues, kCodes };

// A grid in float32 terms.  cpu.py's struct formats mirror these structs field by field; change kAbi in cpu.cpp and ABI
// there with them.
struct Grid {
  float max, saturation;
  int32_t mantissa_bits, emin, emax, sign_code, max_code;
};

// One form of the operand.
struct Form {
  void* out;           // [rows, cols], contiguous: values of x's type, or codes (uint8)
  float* scales;       // [row blocks, column blocks] by the strides below, or null for values
  int64_t* saturated;  // for codes: elements beyond grid.saturation; null if not counted
  float* tensor_scale;  // for codes under E4M3 scales: what multiplies all scales; else null
  // For each whole row, or each whole column if blocks have one column; null if blocks have their own scales.
  const float *encode, *decode;
  int64_t scale_row_stride, scale_col_stride;
  uint64_t row0, col0;  // global position of the first element, for the random bits
  // Where rows lie, counted from row0, as in rounding.py's Rows; consecutive if piece is 0.
  int64_t piece, sequence, first, second;
  uint32_t key0, key1, iteration;
  int32_t stochastic, output, scale, block_rows, block_cols;  // scale: an enum Scale of cpu_kernels.h
  Grid grid;
  Grid stored;  // what codes are written in: grid itself or its carrier
};

struct Call {
  const void* x;             // [rows, cols], contiguous, bfloat16 or float32
  const float* tensor_amax;  // for E4M3 scales
  int64_t rows, cols;
  int64_t stream_bytes;  // outputs from this size on bypass the caches
  int32_t bfloat16, threads, isa, form_count;
};

// Codes and scales back to values.
struct Decode {
  const uint8_t* codes;  // [rows, cols]
  const float* scales;   // [row blocks, column blocks]
  void* out;             // [rows, cols], bfloat16 or float32
  int64_t rows, cols;
  int64_t block_rows, block_cols;
  int64_t stream_bytes;
  int32_t bfloat16, threads, isa;
  Grid grid;
};

// A step of AdamW on one parameter, as quant/adamw/kernels.py lays it out; step.py there explains the numbers.
struct AdamW {
  uint16_t *weight, *m, *v, *weight_low, *v_low;  // [rows, cols] bfloat16, contiguous; the low parts may be null
  const uint16_t* grad;
  int64_t rows, cols;
  uint64_t row0, col0;  // global position of the first element, for the random bits
  uint32_t key0, key1, iteration;
  int32_t stochastic, threads, isa;
  float clip, beta1, rest1, beta2, rest2, beta2_high, beta2_low, rate, correction, eps, decay;
};

// The kernels of one instruction set.  Column ranges start at multiples of the blocks and hold at most kStrip
// columns, row ranges start at multiples of the blocks.
struct Kernels {
  // Returns how many elements saturated.
  int64_t (*cast)(const Call&, const Form&, int64_t row, int64_t last_row, int64_t col, int64_t last_col);
  void (*decode)(const Decode&, int64_t row, int64_t last_row, int64_t col, int64_t last_col);
  uint32_t (*amax)(const void* x, int64_t count, bool bfloat16);  // float32 bits of the largest finite magnitude
  void (*copy)(const void* from, void* to, int64_t bytes);        // non-temporal, whole cache lines
  void (*adamw)(const AdamW&, int64_t row, int64_t last_row, int64_t col, int64_t last_col);
};

constexpr int kStrip = 4096;
// Columns of a strip of several rows, so that it fits the L2 cache twice; blocks are at most this wide.
constexpr int kTallStrip = 1024;
constexpr int kMostRows = 128;  // of a block under four over six
constexpr float kFloatMax = 3.402823466e+38f;

}  // namespace megatron_snip
