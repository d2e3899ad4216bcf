// One query token per sequence attends to its keys. The query heads of one KV head are handled together, so that every key and
// value is read from memory once. The softmax is computed online, one block at a time (Milakov and Gimelshein, arXiv:1805.02867).
// Long contexts are split into parts, so that a single one keeps all threads busy. Where they are split depends on nothing else, so that
// a sequence's output does not depend on what it is computed with.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "attention_part.h"
#include "common.h"
#include "decode_bfloat16.h"
#include "parallel.h"

namespace {

constexpr int64_t TASKS_PER_THREAD = 4;  // at least, where there are as many parts: so that all threads end at about the same time

// With `is_quantized`, the caches are those of quantized_cache.h: blocks of 16 tokens, and keys and values of one size, 64 or 128, for queries of
// bfloat16.
struct Shape {
    int64_t num_heads, num_kv_heads, key_size, value_size, block_size;
    bool is_quantized;
};

// The block table of sequence i is row rows[i] of `blocks`.
struct BlockTables {
    const int32_t* blocks;
    int64_t width;
    const int64_t* rows;

    const int32_t* operator[](int64_t sequence) const { return blocks + rows[sequence] * width; }
};

template <typename T, int64_t SIZE>
inline float dot(const float* query, const T* key, int64_t size) {
    const int64_t n = SIZE > 0 ? SIZE : size;
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < n; ++d) sum += query[d] * to_float(key[d]);
    return sum;
}

// One sequence, one KV head, all of its query heads, the keys from `first` to `last`. `scratch` holds, for each of the group's heads:
// query [key_size], scores [block_size].
template <typename T, int64_t SIZE>
void decode_part(const Part& part, const T* query, const T* key_cache, const T* value_cache, const int32_t* blocks, int64_t first, int64_t last,
                 int64_t kv_head, const Shape& shape, const Options& options, float* scratch) {
    const int64_t group = shape.num_heads / shape.num_kv_heads;
    const int64_t key_size = SIZE > 0 ? SIZE : shape.key_size;
    const int64_t value_size = SIZE > 0 ? SIZE : shape.value_size;
    float* queries = scratch;
    float* scores = queries + group * key_size;
    float *accumulators = part.sums, *maxima = part.maxima, *sums = part.totals;
    for (int64_t g = 0; g < group; ++g) {
        const int64_t head = kv_head * group + g;
        for (int64_t d = 0; d < key_size; ++d) queries[g * key_size + d] = to_float(query[head * key_size + d]) * options.scaling;
        std::fill_n(accumulators + g * value_size, value_size, 0.0f);
        maxima[g] = HIDDEN;
        sums[g] = 0.0f;
    }
    const int64_t key_stride = shape.num_kv_heads * key_size;
    // Values at the address of the keys are the first numbers of these.
    const int64_t value_stride = value_cache == key_cache ? key_stride : shape.num_kv_heads * value_size;
    for (int64_t block = first / shape.block_size; block * shape.block_size < last; ++block) {
        const int64_t begin = std::max<int64_t>(first - block * shape.block_size, 0);
        const int64_t end = std::min(shape.block_size, last - block * shape.block_size);
        const T* keys = key_cache + (int64_t{blocks[block]} * shape.block_size) * key_stride + kv_head * key_size;
        const T* values = value_cache + (int64_t{blocks[block]} * shape.block_size) * value_stride + kv_head * value_size;
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
    for (int64_t g = 0; g < group; ++g) maxima[g] *= LOG2_E;
}

template <typename T, int64_t SIZE>
void decode(T* out, const T* query, const T* key_cache, const T* value_cache, const BlockTables& tables, const int64_t* context_lens,
            int64_t num_sequences, const Shape& shape, const Options& options) {
    const int64_t group = shape.num_heads / shape.num_kv_heads;
    const int64_t part_size = Part::size(group, shape.value_size);
    // Some parts of one sequence, one after the other, for some KV heads. Its places are those of all parts of the first of these, side by side,
    // then of the next.
    struct Task {
        int64_t sequence;
        KVHeads heads;
        int64_t first_key, first_part, end_part, first_place, num_parts;
    };
    static thread_local std::vector<Task> tasks;  // kept, as are the parts: fresh memory would be cleared by the system for each layer
    static thread_local std::vector<float> parts;
    auto first_key_of = [&](int64_t sequence) { return options.window > 0 ? std::max<int64_t>(0, context_lens[sequence] - options.window) : 0; };
    auto end_part_of = [&](int64_t sequence) { return std::max<int64_t>((context_lens[sequence] + KEYS_OF_PART - 1) / KEYS_OF_PART, 1); };
    int64_t num_all = 0, num_keys = 0, most_keys = 0;
    for (int64_t sequence = 0; sequence < num_sequences; ++sequence) {
        num_all += (end_part_of(sequence) - first_key_of(sequence) / KEYS_OF_PART) * shape.num_kv_heads;
        const int64_t own_keys = context_lens[sequence] - first_key_of(sequence);
        num_keys += own_keys * shape.num_kv_heads;
        most_keys = std::max(most_keys, own_keys);
    }
    const bool is_vectorized = std::is_same_v<T, BFloat16> && SIZE > 0 && shape.block_size == BLOCK && group <= MAX_GROUP;
    // Read together, all rows of a block take two thirds of the time that they take head by head. Longer runs come second.
    const int64_t num_enough = omp_get_max_threads() > 1 ? TASKS_PER_THREAD * omp_get_max_threads() : 1;
    const int64_t most_heads = is_vectorized ? std::min(shape.num_kv_heads, std::max<int64_t>(MOST_QUERY_HEADS / group, 1)) : 1;
    const int64_t heads_at_once = std::clamp<int64_t>(num_all / num_enough, 1, most_heads);
    const int64_t run = std::max<int64_t>(num_all / heads_at_once / num_enough, 1);
    tasks.clear();
    int64_t place = 0;
    for (int64_t sequence = 0; sequence < num_sequences; ++sequence) {
        const int64_t first_key = first_key_of(sequence), end_part = end_part_of(sequence), num_parts = end_part - first_key / KEYS_OF_PART;
        for (int64_t head = 0; head < shape.num_kv_heads; head += heads_at_once) {
            const KVHeads heads{head, std::min(heads_at_once, shape.num_kv_heads - head)};
            for (int64_t part = first_key / KEYS_OF_PART; part < end_part; part += run)
                tasks.push_back({sequence, heads, first_key, part, std::min(part + run, end_part), place, num_parts});
            place += heads.count * num_parts;
        }
    }
    if (static_cast<int64_t>(parts.size()) < num_all * part_size) parts.resize(num_all * part_size);
    const Task* const all_tasks = tasks.data();  // this thread's, whichever thread runs one
    float* const all_parts = parts.data();
    std::vector<std::atomic<int64_t>> num_done(num_all);
    const int64_t num_elements = num_keys * (shape.key_size + shape.value_size);
    const double nanoseconds = std::max(reading(num_elements * (shape.is_quantized ? 1 : sizeof(T))), multiplying(num_elements * group));
    const auto first_tile_of = [&](const Task& task, int64_t part) {
        return FirstTile(tables[task.sequence], std::max(task.first_key, part * KEYS_OF_PART), context_lens[task.sequence], task.heads);
    };
    const auto run_task = [&](const Task& task, bool is_first, const FirstTile& next) {
        const T* sequence_query = query + task.sequence * shape.num_heads * shape.key_size;
        const int32_t* blocks = tables[task.sequence];
        const int64_t context_len = context_lens[task.sequence];
        const int64_t head_size = task.num_parts * part_size;  // of a KV head's parts
        float* const task_parts = all_parts + task.first_place * part_size;
        for (int64_t part = task.first_part; part < task.end_part; ++part) {
            float* const into = task_parts + (part - task.first_key / KEYS_OF_PART) * part_size;
            const int64_t first = std::max(task.first_key, part * KEYS_OF_PART), last = std::min(context_len, (part + 1) * KEYS_OF_PART);
            if constexpr (std::is_same_v<T, BFloat16> && SIZE > 0) {
                if (is_vectorized) {
                    auto run = [&](const auto& keys, const auto& values) {
                        decode_part_bfloat16<SIZE>(into, head_size, sequence_query, keys, values, blocks, first, last, is_first && part == task.first_part,
                                                   part + 1 < task.end_part ? first_tile_of(task, part + 1) : next, task.heads, group, options);
                    };
                    if (shape.is_quantized) {
                        run(QuantizedCache<SIZE>(key_cache, shape.num_kv_heads), QuantizedCache<SIZE>(value_cache, shape.num_kv_heads));
                    } else {
                        run(BFloat16Cache<SIZE>(key_cache, shape.num_kv_heads), BFloat16Cache<SIZE>(value_cache, shape.num_kv_heads));
                    }
                    continue;
                }
            }
            std::vector<float> scratch(group * (shape.key_size + shape.block_size));
            decode_part<T, SIZE>(Part(into, group, shape.value_size), sequence_query, key_cache, value_cache, blocks, first, last, task.heads.first,
                                 shape, options, scratch.data());
        }
        const int64_t done = num_done[task.first_place].fetch_add(task.end_part - task.first_part, std::memory_order_acq_rel);
        if (done + task.end_part - task.first_part == task.num_parts)
            for (int64_t h = 0; h < task.heads.count; ++h)
                join_parts(out + task.sequence * shape.num_heads * shape.value_size, task_parts + h * head_size, task.num_parts,
                           (task.heads.first + h) * group, group, shape.value_size, options.sinks);
    };
    const Calls calls = 4 * num_keys >= 3 * most_keys * shape.num_kv_heads * num_sequences ? ALIKE : UNEQUAL;
    parallel_for_runs(tasks.size(), nanoseconds / std::max<size_t>(tasks.size(), 1), calls, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            run_task(all_tasks[i], i == begin, i + 1 < end ? first_tile_of(all_tasks[i + 1], all_tasks[i + 1].first_part) : FirstTile{});
    });
}

template <typename T>
void decode_any(void* out, const void* query, const void* key_cache, const void* value_cache, const BlockTables& tables, const int64_t* context_lens,
                int64_t num_sequences, const Shape& shape, const Options& options) {
    auto run = [&](auto* function) {
        function(static_cast<T*>(out), static_cast<const T*>(query), static_cast<const T*>(key_cache), static_cast<const T*>(value_cache), tables,
                 context_lens, num_sequences, shape, options);
    };
    const bool is_square = shape.key_size == shape.value_size;
    if (is_square && shape.key_size == 64) {
        run(&decode<T, 64>);
    } else if (is_square && shape.key_size == 128) {
        run(&decode<T, 128>);
    } else if (is_square && shape.key_size == 256) {
        run(&decode<T, 256>);
    } else {
        run(&decode<T, 0>);
    }
}

}  // namespace
