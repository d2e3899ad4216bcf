// All layers of a decoder in one call, so that between two matrix products there is nothing but what has to be computed there.
//
// The layers are of the form that most models share: x += attention(norm(x)), x += down(silu(gate(norm(x))) * up(norm(x))), with rotary
// positions; norms may also come after attention and the MLP, or there alone, and a mixture of experts may be in place of the MLP. The sum x
// stays in float32 from the first layer to the last.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "activation.h"
#include "adapters.h"
#include "common.h"
#include "decode.h"
#include "linear.h"
#include "mixture.h"
#include "parallel.h"
#include "prefill.h"
#include "vector.h"

namespace penstock {

constexpr int64_t NO_ROPE = -1;  // positions are not rotated

struct DecoderLayer {
    Linear query_key_value, output, gate_up, down;
    const Mixture* mixture;  // in place of `gate_up` and `down`; null: none
    const float *attention_input_norm, *attention_output_norm, *mlp_input_norm, *mlp_output_norm;  // null: none
    const float *query_norm, *key_norm;  // [head_size], or of all heads together; null: none
    const float* sinks;                  // see `Options`
    BFloat16 *key_cache, *value_cache;   // or those of quantized_cache.h
    int64_t norms_heads_together;
    int64_t window;  // 0: none
    int64_t group;   // of the layers that share block tables
    int64_t rope;    // in `Decoder::ropes`, or NO_ROPE
    Activation activation;
    float scaling, softcap;     // of scores; no softcap: 0
    float residual_multiplier;  // of what is added to x
};

struct Rope {
    const float* inverse_frequencies;  // [rotary_size / 2]
    float factor;
    int32_t is_interleaved;  // neighbouring numbers of a head are turned together, rather than one of each half of `rotary_size`
};

struct Decoder {
    const DecoderLayer* layers;
    int64_t num_layers, hidden_size, num_heads, num_kv_heads, head_size, block_size, has_quantized_cache;
    const float* final_norm;
    const Rope* ropes;
    int64_t num_ropes, rotary_size;  // the first numbers of a head are rotated, those after `rotary_size` are not
    float epsilon;
    const int64_t* key_stops;  // of the batch's tokens: see `Prefill`; null: attention is causal
    const Adapters* adapters;  // of the batch; null: no row has one
    AddUp add_up;
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

// As `apply`, and then function(row) for each row of the result, to which layer `l` of the rows' adapters adds its own part before: see `LowRank`.
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

// 1 / the root mean square of `size` numbers, a multiple of 16 (Zhang and Sennrich, arXiv:1910.07467).
template <typename T>
inline float inverse_rms(const T* x, int64_t size, float epsilon) {
    Vector squares{};
    for (int64_t i = 0; i < size; i += LANES) squares += load(x + i) * load(x + i);
    return 1.0f / std::sqrt(sum_of(squares) / size + epsilon);
}

// The norm of x or, without a weight, x itself.
inline void norm(BFloat16* out, const float* x, const float* weight, int64_t size, float epsilon) {
    if (!weight) {
        for (int64_t i = 0; i < size; i += LANES) convert(out + i, load(x + i));
        return;
    }
    const float scale = inverse_rms(x, size, epsilon);
    for (int64_t i = 0; i < size; i += LANES) convert(out + i, load(x + i) * scale * load(weight + i));
}

// x += multiplier * change, of which the norm is taken before where there is a `change_norm`; and the norm of x.
inline void add_and_norm(BFloat16* out, float* x, const BFloat16* change, const float* change_norm, float multiplier, const float* weight, int64_t size,
                         float epsilon) {
    const float change_scale = change_norm ? inverse_rms(change, size, epsilon) * multiplier : multiplier;
    Vector squares{};
    for (int64_t i = 0; i < size; i += LANES) {
        Vector added = load(change + i) * change_scale;
        if (change_norm) added *= load(change_norm + i);
        const Vector sum = load(x + i) + added;
        convert(x + i, sum);
        squares += sum * sum;
    }
    if (!weight) return norm(out, x, nullptr, size, epsilon);
    const float scale = 1.0f / std::sqrt(sum_of(squares) / size + epsilon);
    for (int64_t i = 0; i < size; i += LANES) convert(out + i, load(x + i) * scale * load(weight + i));
}

// The angles of a position, of which `rotary_size` numbers of a head are turned (Su et al., arXiv:2104.09864).
struct Angles {
    const float *cosines, *sines;
    int64_t rotary_size;  // 0: none are
    bool is_interleaved;
};

// The numbers of a head that are turned, one of each half together, and normed before where there is a weight: times `scale` and that.
inline void rotate_halves(BFloat16* out, const BFloat16* head, const float* norm_weight, float scale, const Angles& angles) {
    const int64_t half = angles.rotary_size / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        Vector first = load(head + i), second = load(head + half + i);
        if (norm_weight) {
            first *= load(norm_weight + i) * scale;
            second *= load(norm_weight + half + i) * scale;
        }
        convert(out + i, first * load(angles.cosines + i) - second * load(angles.sines + i));
        convert(out + half + i, second * load(angles.cosines + i) + first * load(angles.sines + i));
    }
}

// The same with neighbours together, of which none is normed.
inline void rotate_neighbours(BFloat16* out, const BFloat16* head, const Angles& angles) {
    for (int64_t i = 0; i < angles.rotary_size / 2; i += LANES) {
        const Vector first = of_pairs<0>(head + 2 * i), second = of_pairs<1>(head + 2 * i);
        float turned[2][LANES];
        convert(turned[0], first * load(angles.cosines + i) - second * load(angles.sines + i));
        convert(turned[1], second * load(angles.cosines + i) + first * load(angles.sines + i));
        for (int64_t j = 0; j < 2 * LANES; ++j) store(out + 2 * i + j, turned[j % 2][j / 2]);
    }
}

// All numbers of a head.
inline void rotate(BFloat16* out, const BFloat16* head, const float* norm_weight, float scale, const Angles& angles, int64_t size) {
    if (angles.is_interleaved) {
        rotate_neighbours(out, head, angles);
    } else {
        rotate_halves(out, head, norm_weight, scale, angles);
    }
    for (int64_t i = angles.rotary_size; i < size; i += LANES) {
        Vector numbers = load(head + i);
        if (norm_weight) numbers *= load(norm_weight + i) * scale;
        convert(out + i, numbers);
    }
}

// The heads of one row's queries or keys, normed where there are weights, each by itself or all together. Calls rotate(head, first, weight, scale) for each.
template <typename Function>
inline void for_normed_heads(const BFloat16* row, int64_t width, const float* weight, bool norms_together, int64_t head_size, float epsilon,
                             const Function& function) {
    const float scale = weight && norms_together ? inverse_rms(row, width, epsilon) : 1.0f;
    for (int64_t first = 0; first < width; first += head_size) {
        if (!weight || norms_together) {
            function(first, weight ? weight + first : nullptr, scale);
        } else {
            function(first, weight, inverse_rms(row + first, head_size, epsilon));
        }
    }
}

// What one step needs room for.
struct DecoderScratch {
    std::unique_ptr<float[]> cosines, sines;
    std::unique_ptr<BFloat16[]> normed, projected, queries, attended, activated;
    MixtureScratch mixture;

    DecoderScratch(const Decoder& decoder, int64_t num_tokens)
        : cosines(new float[decoder.num_ropes * num_tokens * decoder.rotary_size / 2]),
          sines(new float[decoder.num_ropes * num_tokens * decoder.rotary_size / 2]),
          normed(new BFloat16[num_tokens * decoder.hidden_size]),
          projected(new BFloat16[num_tokens * widest(decoder)]),
          queries(new BFloat16[num_tokens * decoder.num_heads * decoder.head_size]),
          attended(new BFloat16[num_tokens * decoder.num_heads * decoder.head_size]),
          activated(new BFloat16[num_tokens * largest(decoder, [](const DecoderLayer& layer) { return layer.down.inputs; })]),
          mixture(any_mixture(decoder), decoder.hidden_size, num_tokens) {}

    template <typename Size>
    static int64_t largest(const Decoder& decoder, const Size& size) {
        int64_t most = 0;
        for (int64_t l = 0; l < decoder.num_layers; ++l) most = std::max<int64_t>(most, size(decoder.layers[l]));
        return most;
    }

    static int64_t widest(const Decoder& decoder) {
        return largest(decoder, [&](const DecoderLayer& layer) {
            return std::max({layer.query_key_value.outputs, layer.gate_up.outputs, decoder.hidden_size});
        });
    }

    static const Mixture* any_mixture(const Decoder& decoder) {  // all are of one size
        for (int64_t l = 0; l < decoder.num_layers; ++l)
            if (decoder.layers[l].mixture) return decoder.layers[l].mixture;
        return nullptr;
    }
};

inline void attend(const Decoder& decoder, const DecoderLayer& layer, const Step& step, BFloat16* out, const BFloat16* queries) {
    const Options options{layer.scaling, layer.window, layer.softcap, layer.sinks};
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
                             decoder.num_kv_heads, decoder.head_size, decoder.head_size, decoder.block_size, shape.is_quantized, options,
                             decoder.key_stops ? decoder.key_stops + first : nullptr});
    }
    if (!sequences.empty()) prefill(sequences);
}

// Rotates a token's keys into the cache, and copies its values.
inline void write_cache(const Decoder& decoder, const DecoderLayer& layer, int64_t slot, const BFloat16* keys, const BFloat16* values,
                        const Angles& angles) {
    const int64_t size = decoder.head_size, width = decoder.num_kv_heads * size;
    const auto for_heads = [&](const auto& function) {
        for_normed_heads(keys, width, layer.key_norm, layer.norms_heads_together, size, decoder.epsilon, function);
    };
    if (!decoder.has_quantized_cache) {
        BFloat16* key = layer.key_cache + slot * width;
        for_heads([&](int64_t d, const float* weight, float scale) { rotate(key + d, keys + d, weight, scale, angles, size); });
        std::memcpy(layer.value_cache + slot * width, values, width * sizeof(BFloat16));
        return;
    }
    const int64_t block = slot / decoder.block_size, place = slot % decoder.block_size;
    for_heads([&](int64_t d, const float* weight, float scale) {
        BFloat16 key[MAX_CODES];
        rotate(key, keys + d, weight, scale, angles, size);
        CodeRows(layer.key_cache, block, d / size, decoder.num_kv_heads, decoder.block_size, size).write(place, key);
        CodeRows(layer.value_cache, block, d / size, decoder.num_kv_heads, decoder.block_size, size).write(place, values + d);
    });
}

// `x` [num_tokens, hidden_size] is what the embedding gives, and is overwritten. Writes the normed output of the last layer for the rows
// `kept`, which ascend, to out [num_kept, hidden_size].
inline void run_decoder(const Decoder& decoder, const Step& step, BFloat16* out, float* x, const int64_t* positions, const int64_t* kept,
                        int64_t num_kept) {
    const int64_t size = decoder.hidden_size, head_size = decoder.head_size, half = decoder.rotary_size / 2;
    const int64_t query_width = decoder.num_heads * head_size, key_width = decoder.num_kv_heads * head_size;
    const int64_t num_tokens = step.num_real_tokens();
    const DecoderScratch scratch(decoder, step.num_tokens);
    BFloat16* normed = scratch.normed.get();
    BFloat16* projected = scratch.projected.get();
    BFloat16* attended = scratch.attended.get();
    constexpr int64_t ANGLE = 40;  // an angle's cosine and sine take as long as so many simple operations
    parallel_for(num_tokens, elementwise(size + decoder.num_ropes * half * ANGLE), [&](int64_t t) {
        for (int64_t r = 0; r < decoder.num_ropes; ++r) {
            const Rope& rope = decoder.ropes[r];
            for (int64_t i = 0, place = (r * num_tokens + t) * half; i < half; ++i, ++place) {
                const float angle = positions[t] * rope.inverse_frequencies[i];
                scratch.cosines[place] = std::cos(angle) * rope.factor;
                scratch.sines[place] = std::sin(angle) * rope.factor;
            }
        }
        norm(normed + t * size, x + t * size, decoder.layers[0].attention_input_norm, size, decoder.epsilon);
    });
    for (int64_t l = 0; l < decoder.num_layers; ++l) {
        const DecoderLayer& layer = decoder.layers[l];
        const int64_t width = layer.query_key_value.outputs;
        const int64_t* slots = step.slots_of(layer.group);
        const auto rotate_row = [&](int64_t t) {
            const BFloat16* row = projected + t * width;
            const int64_t rope = std::max<int64_t>(layer.rope, 0), place = (rope * num_tokens + t) * half;
            const Angles angles{&scratch.cosines[place], &scratch.sines[place], layer.rope == NO_ROPE ? 0 : decoder.rotary_size,
                                decoder.ropes[rope].is_interleaved != 0};
            for_normed_heads(row, query_width, layer.query_norm, layer.norms_heads_together, head_size, decoder.epsilon,
                             [&](int64_t d, const float* weight, float scale) {
                                 rotate(&scratch.queries[t * query_width + d], row + d, weight, scale, angles, head_size);
                             });
            write_cache(decoder, layer, slots[t], row + query_width, row + query_width + key_width, angles);
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
            add_and_norm(normed + t * size, x + t * size, projected + t * size, layer.attention_output_norm, layer.residual_multiplier,
                         layer.mlp_input_norm, size, decoder.epsilon);
        });
        const float* next_norm = is_last ? decoder.final_norm : decoder.layers[l + 1].attention_input_norm;
        const auto end_row = [&](int64_t t) {
            add_and_norm((is_last ? out : normed) + t * size, x + t * size, projected + t * size, layer.mlp_output_norm, layer.residual_multiplier,
                         next_norm, size, decoder.epsilon);
        };
        if (layer.mixture) {
            apply_mixture(*layer.mixture, scratch.mixture, layer.activation, projected, normed, num_rows, size, decoder.add_up, end_row);
            continue;
        }
        const int64_t inner = layer.down.inputs;
        apply(layer.gate_up, projected, normed, num_rows, decoder.adapters, l, is_last, &LayerAdapter::gate_up, elementwise(2 * inner),
              [&](int64_t t) { activate(layer.activation, &scratch.activated[t * inner], projected + 2 * t * inner, inner); });
        apply_summed(decoder, layer.down, projected, scratch.activated.get(), num_rows, l, is_last, &LayerAdapter::down, elementwise(size),
                     end_row);
    }
}

}  // namespace
