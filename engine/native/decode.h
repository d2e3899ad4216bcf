// One query token per sequence attends to its keys. The query heads of one KV head are handled together, so that every key and
// value is read from memory once. The softmax is computed online, one block at a time (Milakov and Gimelshein, arXiv:1805.02867).

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "common.h"
#include "decode_bfloat16.h"
#include "parallel.h"

namespace {

struct Shape {
    int64_t num_heads, num_kv_heads, key_size, value_size, block_size, blocks_per_sequence;
};

template <typename T, int64_t SIZE>
inline float dot(const float* query, const T* key, int64_t size) {
    const int64_t n = SIZE > 0 ? SIZE : size;
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < n; ++d) sum += query[d] * to_float(key[d]);
    return sum;
}

// One sequence, one KV head, all of its query heads. `scratch` holds, for each of the group's heads: query [key_size], accumulator [value_size],
// scores [block_size].
template <typename T, int64_t SIZE>
void decode_group(T* out, const T* query, const T* key_cache, const T* value_cache, const int64_t* blocks, int64_t context_len, int64_t kv_head,
                  const Shape& shape, const Options& options, float* scratch) {
    const int64_t group = shape.num_heads / shape.num_kv_heads;
    const int64_t key_size = SIZE > 0 ? SIZE : shape.key_size;
    const int64_t value_size = SIZE > 0 ? SIZE : shape.value_size;
    float* queries = scratch;
    float* accumulators = queries + group * key_size;
    float* scores = accumulators + group * value_size;
    float* maxima = scores + group * shape.block_size;
    float* sums = maxima + group;
    for (int64_t g = 0; g < group; ++g) {
        const int64_t head = kv_head * group + g;
        for (int64_t d = 0; d < key_size; ++d) queries[g * key_size + d] = to_float(query[head * key_size + d]) * options.scaling;
        std::fill_n(accumulators + g * value_size, value_size, 0.0f);
        maxima[g] = options.sinks ? options.sinks[head] : -std::numeric_limits<float>::infinity();
        sums[g] = options.sinks ? 1.0f : 0.0f;
    }
    const int64_t first = options.window > 0 ? std::max<int64_t>(0, context_len - options.window) : 0;
    const int64_t key_stride = shape.num_kv_heads * key_size;
    const int64_t value_stride = shape.num_kv_heads * value_size;
    for (int64_t block = first / shape.block_size; block * shape.block_size < context_len; ++block) {
        const int64_t begin = std::max<int64_t>(first - block * shape.block_size, 0);
        const int64_t end = std::min(shape.block_size, context_len - block * shape.block_size);
        const T* keys = key_cache + (blocks[block] * shape.block_size) * key_stride + kv_head * key_size;
        const T* values = value_cache + (blocks[block] * shape.block_size) * value_stride + kv_head * value_size;
        for (int64_t i = begin; i < end; ++i) {
            const T* key = keys + i * key_stride;
            for (int64_t g = 0; g < group; ++g) {
                float score = dot<T, SIZE>(queries + g * key_size, key, key_size);
                if (options.softcap > 0.0f) score = options.softcap * std::tanh(score / options.softcap);
                scores[g * shape.block_size + i] = score;
            }
        }
        for (int64_t g = 0; g < group; ++g) {
            float* row = scores + g * shape.block_size;
            float* accumulator = accumulators + g * value_size;
            float maximum = maxima[g];
            for (int64_t i = begin; i < end; ++i) maximum = std::max(maximum, row[i]);
            if (maximum > maxima[g]) {
                const float correction = std::exp(maxima[g] - maximum);
                sums[g] *= correction;
                for (int64_t d = 0; d < value_size; ++d) accumulator[d] *= correction;
                maxima[g] = maximum;
            }
            for (int64_t i = begin; i < end; ++i) {
                row[i] = std::exp(row[i] - maximum);
                sums[g] += row[i];
            }
        }
        for (int64_t i = begin; i < end; ++i) {
            const T* value = values + i * value_stride;
            for (int64_t g = 0; g < group; ++g) {
                const float weight = scores[g * shape.block_size + i];
                float* accumulator = accumulators + g * value_size;
#pragma omp simd
                for (int64_t d = 0; d < value_size; ++d) accumulator[d] += weight * to_float(value[d]);
            }
        }
    }
    for (int64_t g = 0; g < group; ++g) {
        const float scale = sums[g] > 0.0f ? 1.0f / sums[g] : 0.0f;
        T* row = out + (kv_head * group + g) * value_size;
        for (int64_t d = 0; d < value_size; ++d) store(row + d, accumulators[g * value_size + d] * scale);
    }
}

template <typename T, int64_t SIZE>
void decode(T* out, const T* query, const T* key_cache, const T* value_cache, const int64_t* block_table, const int64_t* context_lens,
            int64_t num_sequences, const Shape& shape, const Options& options) {
    const int64_t group = shape.num_heads / shape.num_kv_heads;
    const int64_t scratch_size = group * (shape.key_size + shape.value_size + shape.block_size + 2);
    const int64_t num_tasks = num_sequences * shape.num_kv_heads;
    parallel_for(num_tasks, [&](int64_t task) {
        const int64_t sequence = task / shape.num_kv_heads;
        T* sequence_out = out + sequence * shape.num_heads * shape.value_size;
        const T* sequence_query = query + sequence * shape.num_heads * shape.key_size;
        const int64_t* blocks = block_table + sequence * shape.blocks_per_sequence;
#ifdef __AVX512BF16__
        if constexpr (std::is_same_v<T, BFloat16> && SIZE > 0) {
            if (shape.block_size == BLOCK && group <= MAX_GROUP) {
                decode_group_bfloat16<SIZE>(sequence_out, sequence_query, key_cache, value_cache, blocks, context_lens[sequence],
                                            task % shape.num_kv_heads, group, shape.num_kv_heads, options);
                return;
            }
        }
#endif
        std::vector<float> scratch(scratch_size);
        decode_group<T, SIZE>(sequence_out, sequence_query, key_cache, value_cache, blocks, context_lens[sequence], task % shape.num_kv_heads, shape,
                              options, scratch.data());
    });
}

template <typename T>
void decode_any(void* out, const void* query, const void* key_cache, const void* value_cache, const int64_t* block_table, const int64_t* context_lens,
                int64_t num_sequences, const Shape& shape, const Options& options) {
    auto run = [&](auto* function) {
        function(static_cast<T*>(out), static_cast<const T*>(query), static_cast<const T*>(key_cache), static_cast<const T*>(value_cache), block_table,
                 context_lens, num_sequences, shape, options);
    };
    const bool is_square = shape.key_size == shape.value_size;
    if (is_square && shape.key_size == 64) {
        run(&decode<T, 64>);
    } else if (is_square && shape.key_size == 128) {
        run(&decode<T, 128>);
    } else {
        run(&decode<T, 0>);
    }
}

}  // namespace
