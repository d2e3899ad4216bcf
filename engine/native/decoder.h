// All layers of a decoder in one call, so that between two matrix products there is nothing but what has to be computed there.
//
// The layers are of the form that most models share: x += attention(norm(x)), x += down(silu(gate(norm(x))) * up(norm(x))), with rotary
// positions. The sum x stays in float32 from the first layer to the last.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "adapters.h"
#include "common.h"
#include "decode.h"
#include "float8_linear.h"
#include "panel_linear.h"
#include "parallel.h"
#include "prefill.h"
#include "quantized_linear.h"
#include "vector.h"

namespace penstock {

struct Linear {
    int64_t num_parts;  // of a quantized weight (quantized_linear.h); 0: one of bfloat16 in panels (panel_linear.h); IS_FLOAT8
    int64_t inputs, outputs;
    const void* weight;  // the parts, or the panels
    const BFloat16* bias;  // null: none
    const int64_t* order;  // [inputs]: column i of a quantized weight is for input order[i]; null: for input i
};

constexpr int64_t IS_FLOAT8 = -1;  // in place of a number of parts: float8_linear.h

struct DecoderLayer {
    Linear query_key_value, output, gate_up, down;
    const float *input_norm, *post_norm, *query_norm, *key_norm;  // the latter two null in models without them
    BFloat16 *key_cache, *value_cache;  // or those of quantized_cache.h
    int64_t window;  // 0: none
    int64_t group;   // of the layers that share block tables
    float scaling;
};

struct Decoder {
    const DecoderLayer* layers;
    int64_t num_layers, hidden_size, num_heads, num_kv_heads, head_size, block_size, has_quantized_cache;
    const float* final_norm;
    const float* inverse_frequencies;  // [head_size / 2]
    float rope_factor;
    float epsilon;
    const Adapters* adapters;  // of the batch; null: no row has one
    void (*add_up)(BFloat16* values, int64_t count);  // makes them the sums over all ranks; null: there is one rank
};

// Views of the packed metadata, and the block tables; see engine/attention/interface.py.
struct Step {
    int64_t num_tokens, num_sequences, num_decodes;
    const int64_t *query_starts, *slots, *context_lens, *table_rows;
    const int32_t* block_tables;
    int64_t table_width;

    Step(const int64_t* packed, const int32_t* block_tables, int64_t table_width)
        : num_tokens(packed[0]), num_sequences(packed[1]), num_decodes(packed[2]), query_starts(packed + 6),
          slots(query_starts + num_sequences + 1), context_lens(slots + packed[3] * num_tokens), table_rows(context_lens + num_sequences),
          block_tables(block_tables), table_width(table_width) {}

    const int64_t* slots_of(int64_t group) const { return slots + group * num_tokens; }
    const int64_t* table_rows_of(int64_t group) const { return table_rows + group * num_sequences; }

    int64_t num_real_tokens() const { return query_starts[num_sequences]; }
};

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

// The same, and then function(row) for each row of the result, to which layer `l` of the rows' adapters adds its own part before: see `LowRank`.
template <typename Part, int64_t NUM_PARTS, typename Function>
void apply(const Linear& linear, BFloat16* out, const BFloat16* x, int64_t num_rows, const Adapters* adapters, int64_t l, bool is_kept,
           Part (LayerAdapter::*updates)[NUM_PARTS], double nanoseconds, const Function& function) {
    if (!adapters) {
        apply(linear, out, x, num_rows);
        return parallel_for(num_rows, nanoseconds, function);
    }
    const AdapterRun* runs = is_kept ? adapters->kept_runs : adapters->runs;
    const int64_t num_runs = is_kept ? adapters->num_kept_runs : adapters->num_runs;
    const auto updates_of = [&](const AdapterRun& run) -> const LowRank* { return run.layers[l].*updates; };
    apply(linear, out, x, num_rows, weights_of<NUM_PARTS>(runs, num_runs, updates_of, linear.inputs));
    for_adapted_rows<NUM_PARTS>(out, linear.outputs, x, linear.inputs, num_rows, runs, num_runs, updates_of, nanoseconds, function);
}

// The same of a layer of which each rank computes a part of the sum.
template <typename Part, int64_t NUM_PARTS, typename Function>
void apply_summed(const Decoder& decoder, const Linear& linear, BFloat16* out, const BFloat16* x, int64_t num_rows, int64_t l, bool is_kept,
                  Part (LayerAdapter::*updates)[NUM_PARTS], double nanoseconds, const Function& function) {
    if (!decoder.add_up) return apply(linear, out, x, num_rows, decoder.adapters, l, is_kept, updates, nanoseconds, function);
    apply(linear, out, x, num_rows, decoder.adapters, l, is_kept, updates, 0.0, [](int64_t) {});
    decoder.add_up(out, num_rows * linear.outputs);
    parallel_for(num_rows, nanoseconds, function);
}

// Root mean square over `size` numbers, a multiple of 16 (Zhang and Sennrich, arXiv:1910.07467).
inline void norm(BFloat16* out, const float* x, const float* weight, int64_t size, float epsilon) {
    Vector squares{};
    for (int64_t i = 0; i < size; i += LANES) squares += load(x + i) * load(x + i);
    const float scale = 1.0f / std::sqrt(sum_of(squares) / size + epsilon);
    for (int64_t i = 0; i < size; i += LANES) convert(out + i, load(x + i) * scale * load(weight + i));
}

// x += change, and its norm.
inline void add_and_norm(BFloat16* out, float* x, const BFloat16* change, const float* weight, int64_t size, float epsilon) {
    Vector squares{};
    for (int64_t i = 0; i < size; i += LANES) {
        const Vector sum = load(x + i) + load(change + i);
        convert(x + i, sum);
        squares += sum * sum;
    }
    const float scale = 1.0f / std::sqrt(sum_of(squares) / size + epsilon);
    for (int64_t i = 0; i < size; i += LANES) convert(out + i, load(x + i) * scale * load(weight + i));
}

// One head's numbers, normed where there is a weight, then turned by the position's angles (Su et al., arXiv:2104.09864).
inline void rotate(BFloat16* out, const BFloat16* head, const float* norm_weight, const float* cosines, const float* sines, int64_t size,
                   float epsilon) {
    const int64_t half = size / 2;
    float scale = 1.0f;
    if (norm_weight) {
        Vector squares{};
        for (int64_t i = 0; i < size; i += LANES) squares += load(head + i) * load(head + i);
        scale = 1.0f / std::sqrt(sum_of(squares) / size + epsilon);
    }
    for (int64_t i = 0; i < half; i += LANES) {
        Vector first = load(head + i), second = load(head + half + i);
        if (norm_weight) {
            first *= load(norm_weight + i) * scale;
            second *= load(norm_weight + half + i) * scale;
        }
        convert(out + i, first * load(cosines + i) - second * load(sines + i));
        convert(out + half + i, second * load(cosines + i) + first * load(sines + i));
    }
}

// out = silu(gate) * up; `gate_up` holds the one before the other.
inline void activate(BFloat16* out, const BFloat16* gate_up, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        const Vector gate = load(gate_up + i), one = broadcast(1.0f);
        const Vector smaller = power_of_two(lowest(gate, Vector{} - gate) * LOG2_E);  // e^-|gate|
        const Vector larger = for_parts([&](int64_t p) { return gate.parts[p] > 0.0f ? one.parts[p] : smaller.parts[p]; });
        convert(out + i, gate * (larger / (one + smaller)) * load(gate_up + size + i));
    }
}

// What one step needs room for.
struct DecoderScratch {
    std::unique_ptr<float[]> cosines, sines;
    std::unique_ptr<BFloat16[]> normed, projected, queries, attended, activated;

    DecoderScratch(const Decoder& decoder, int64_t num_tokens)
        : cosines(new float[num_tokens * decoder.head_size / 2]),
          sines(new float[num_tokens * decoder.head_size / 2]),
          normed(new BFloat16[num_tokens * decoder.hidden_size]),
          projected(new BFloat16[num_tokens * widest(decoder)]),
          queries(new BFloat16[num_tokens * decoder.num_heads * decoder.head_size]),
          attended(new BFloat16[num_tokens * decoder.num_heads * decoder.head_size]),
          activated(new BFloat16[num_tokens * decoder.layers[0].down.inputs]) {}

    static int64_t widest(const Decoder& decoder) {
        const DecoderLayer& layer = decoder.layers[0];
        return std::max({layer.query_key_value.outputs, layer.gate_up.outputs, decoder.hidden_size});
    }
};

inline void attend(const Decoder& decoder, const DecoderLayer& layer, const Step& step, BFloat16* out, const BFloat16* queries) {
    const Options options{layer.scaling, layer.window, 0.0f, nullptr};
    const Shape shape{decoder.num_heads, decoder.num_kv_heads, decoder.head_size, decoder.head_size, decoder.block_size,
                      decoder.has_quantized_cache != 0};
    const BlockTables tables{step.block_tables, step.table_width, step.table_rows_of(layer.group)};
    if (step.num_decodes)
        decode_any<BFloat16>(out, queries, layer.key_cache, layer.value_cache, tables, step.context_lens, step.num_decodes, shape, options);
    std::vector<Prefill<BFloat16>> sequences;
    const int64_t width = decoder.num_heads * decoder.head_size;
    for (int64_t i = step.num_decodes; i < step.num_sequences; ++i) {
        const int64_t first = step.query_starts[i];
        sequences.push_back({out + first * width, queries + first * width, layer.key_cache, layer.value_cache,
                             tables[i], step.query_starts[i + 1] - first, step.context_lens[i], decoder.num_heads,
                             decoder.num_kv_heads, decoder.head_size, decoder.head_size, decoder.block_size, shape.is_quantized, options});
    }
    if (!sequences.empty()) prefill(sequences);
}

// Rotates a token's keys into the cache, and copies its values.
inline void write_cache(const Decoder& decoder, const DecoderLayer& layer, int64_t slot, const BFloat16* keys, const BFloat16* values,
                        const float* cosines, const float* sines) {
    const int64_t size = decoder.head_size, width = decoder.num_kv_heads * size;
    if (!decoder.has_quantized_cache) {
        BFloat16* key = layer.key_cache + slot * width;
        for (int64_t d = 0; d < width; d += size) rotate(key + d, keys + d, layer.key_norm, cosines, sines, size, decoder.epsilon);
        std::memcpy(layer.value_cache + slot * width, values, width * sizeof(BFloat16));
        return;
    }
    BFloat16 key[MAX_CODES];
    const int64_t block = slot / decoder.block_size, place = slot % decoder.block_size;
    for (int64_t head = 0; head < decoder.num_kv_heads; ++head) {
        rotate(key, keys + head * size, layer.key_norm, cosines, sines, size, decoder.epsilon);
        CodeRows(layer.key_cache, block, head, decoder.num_kv_heads, decoder.block_size, size).write(place, key);
        CodeRows(layer.value_cache, block, head, decoder.num_kv_heads, decoder.block_size, size).write(place, values + head * size);
    }
}

// `x` [num_tokens, hidden_size] is what the embedding gives, and is overwritten. Writes the normed output of the last layer for the rows
// `kept`, which ascend, to out [num_kept, hidden_size].
inline void run_decoder(const Decoder& decoder, const Step& step, BFloat16* out, float* x, const int64_t* positions, const int64_t* kept,
                        int64_t num_kept) {
    const int64_t size = decoder.hidden_size, head_size = decoder.head_size, half = head_size / 2;
    const int64_t query_width = decoder.num_heads * head_size, key_width = decoder.num_kv_heads * head_size;
    const int64_t num_tokens = step.num_real_tokens();
    const DecoderScratch scratch(decoder, step.num_tokens);
    BFloat16* normed = scratch.normed.get();
    BFloat16* projected = scratch.projected.get();
    BFloat16* attended = scratch.attended.get();
    constexpr int64_t ANGLE = 40;  // an angle's cosine and sine take as long as so many simple operations
    parallel_for(num_tokens, elementwise(size + half * ANGLE), [&](int64_t t) {
        for (int64_t i = 0; i < half; ++i) {
            const float angle = positions[t] * decoder.inverse_frequencies[i];
            scratch.cosines[t * half + i] = std::cos(angle) * decoder.rope_factor;
            scratch.sines[t * half + i] = std::sin(angle) * decoder.rope_factor;
        }
        norm(normed + t * size, x + t * size, decoder.layers[0].input_norm, size, decoder.epsilon);
    });
    for (int64_t l = 0; l < decoder.num_layers; ++l) {
        const DecoderLayer& layer = decoder.layers[l];
        const int64_t width = layer.query_key_value.outputs;
        const int64_t* slots = step.slots_of(layer.group);
        const auto rotate_row = [&](int64_t t) {
            const BFloat16* row = projected + t * width;
            const float *cosines = &scratch.cosines[t * half], *sines = &scratch.sines[t * half];
            for (int64_t d = 0; d < query_width; d += head_size)
                rotate(&scratch.queries[t * query_width + d], row + d, layer.query_norm, cosines, sines, head_size, decoder.epsilon);
            write_cache(decoder, layer, slots[t], row + query_width, row + query_width + key_width, cosines, sines);
        };
        apply(layer.query_key_value, projected, normed, num_tokens, decoder.adapters, l, false, &LayerAdapter::query_key_value,
              elementwise(width), rotate_row);
        attend(decoder, layer, step, attended, scratch.queries.get());
        const bool is_last = l + 1 == decoder.num_layers;
        if (is_last)  // the other rows are not needed any more
            for (int64_t k = 0; k < num_kept; ++k) {
                std::memmove(x + k * size, x + kept[k] * size, size * sizeof(float));
                std::memmove(attended + k * query_width, attended + kept[k] * query_width, query_width * sizeof(BFloat16));
            }
        const int64_t num_rows = is_last ? num_kept : num_tokens;
        apply_summed(decoder, layer.output, projected, attended, num_rows, l, is_last, &LayerAdapter::output, elementwise(size), [&](int64_t t) {
            add_and_norm(normed + t * size, x + t * size, projected + t * size, layer.post_norm, size, decoder.epsilon);
        });
        const int64_t inner = layer.down.inputs;
        apply(layer.gate_up, projected, normed, num_rows, decoder.adapters, l, is_last, &LayerAdapter::gate_up, elementwise(2 * inner),
              [&](int64_t t) { activate(&scratch.activated[t * inner], projected + 2 * t * inner, inner); });
        const float* next_norm = is_last ? decoder.final_norm : decoder.layers[l + 1].input_norm;
        const auto end_row = [&](int64_t t) {
            add_and_norm((is_last ? out : normed) + t * size, x + t * size, projected + t * size, next_norm, size, decoder.epsilon);
        };
        apply_summed(decoder, layer.down, projected, scratch.activated.get(), num_rows, l, is_last, &LayerAdapter::down, elementwise(size),
                     end_row);
    }
}

}  // namespace
