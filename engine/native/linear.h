// A linear layer by a weight of any kind that the kernels read, or one of each expert of a mixture.

#pragma once

#include <cstdint>
#include <vector>

#include "common.h"
#include "float8_linear.h"
#include "panel_linear.h"
#include "parallel.h"
#include "quantized_linear.h"

namespace penstock {

struct Linear {
    int64_t num_parts;  // of a quantized weight (quantized_linear.h); 0: one of bfloat16 in panels (panel_linear.h); IS_FLOAT8
    int64_t inputs, outputs;
    const void* weight;  // the parts, or the panels
    const BFloat16* bias;  // null: none
    const int64_t* order;  // [inputs]: column i of a quantized weight is for input order[i]; null: for input i
    const int64_t* strides;  // of an expert's quantized weight: bytes from each part to that of the next expert
};

constexpr int64_t IS_FLOAT8 = -1;  // in place of a number of parts: float8_linear.h

}  // namespace penstock

namespace {

// The rows with their numbers in another order, until the thread's next call.
inline const BFloat16* in_order(const BFloat16* x, const int64_t* order, int64_t num_rows, int64_t size) {
    static thread_local std::vector<BFloat16> memory;
    if (static_cast<int64_t>(memory.size()) < num_rows * size) memory.resize(num_rows * size);
    BFloat16* const ordered = memory.data();
    parallel_for(num_rows, elementwise(size), [&](int64_t row) {
        for (int64_t i = 0; i < size; ++i) ordered[row * size + i] = x[row * size + order[i]];
    });
    return ordered;
}

inline void apply(const Linear& linear, BFloat16* out, const BFloat16* x, int64_t num_rows, const std::vector<Following>& following = {}) {
    if (linear.num_parts == 0)
        return panel_linear(out, x, static_cast<const BFloat16*>(linear.weight), linear.bias, num_rows, linear.inputs, linear.outputs);
    if (linear.num_parts == IS_FLOAT8)
        return float8_linear(out, x, *static_cast<const Float8Panels*>(linear.weight), linear.bias, num_rows, linear.inputs, linear.outputs);
    if (linear.order) x = in_order(x, linear.order, num_rows, linear.inputs);
    const auto* parts = static_cast<const QuantizedPart*>(linear.weight);
    quantized_linear(out, x, parts, linear.num_parts, linear.bias, num_rows, linear.inputs / GROUP, true, following);
}

// The same with a weight for each expert, of which `linear` is the first: rows from starts[e] to starts[e + 1] are those of expert e.
inline void apply_grouped(const Linear& linear, BFloat16* out, const BFloat16* x, const int64_t* starts, int64_t num_experts) {
    if (linear.num_parts == 0)
        return grouped_panel_linear(out, x, static_cast<const BFloat16*>(linear.weight), linear.bias, starts, num_experts, linear.inputs, linear.outputs);
    if (linear.num_parts == IS_FLOAT8)
        return grouped_float8_linear(out, x, *static_cast<const Float8Panels*>(linear.weight), linear.bias, starts, num_experts, linear.inputs,
                                     linear.outputs);
    const auto* parts = static_cast<const QuantizedPart*>(linear.weight);
    grouped_linear(out, x, parts, linear.strides, linear.num_parts, linear.bias, starts, num_experts, linear.inputs / GROUP, true);
}

}  // namespace
