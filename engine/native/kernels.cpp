// The C++ kernels for CPUs: writing keys and values into their blocks, attention over them, linear layers, whole decoders, and grammars' masks.
// Caches are [num_blocks, block_size, num_kv_heads, head_size], contiguous.
//
// A plain C interface without torch's headers, so that it compiles in seconds; `engine/native/runtime.py` builds and loads it, with products.cpp
// compiled beside it.

#include "bitmask.h"
#include "choice.h"
#include "decode.h"
#include "decoder.h"
#include "float8_linear.h"
#include "greedy.h"
#include "greedy_head.h"
#include "panel_linear.h"
#include "parallel.h"
#include "prefill.h"
#include "quantized_linear.h"
#include "quantized_lookup.h"
#include "tile_choice.h"

extern "C" {

// The number of threads of loops that the calling thread begins. It is OpenMP's, and so torch's, where both have the same OpenMP library.
void penstock_set_num_threads(int64_t num_threads) { omp_set_num_threads(static_cast<int>(num_threads)); }

int64_t penstock_num_threads() { return omp_get_max_threads(); }

// See `Pool::place`. To be called in the thread that runs the model.
void penstock_place_threads(const int32_t* cpus, int64_t num_cpus, int64_t is_pinned) { Pool::instance().place(cpus, num_cpus, is_pinned); }

// See `Pool::record`.
int64_t penstock_record_loops(LoopRecord* records, int64_t capacity) { return Pool::instance().record(records, capacity); }

// Copies row t of `rows` (`row_bytes` long, `row_stride` bytes apart) to slot_mapping[t] of a cache; a negative slot is padding.
void penstock_write_rows(char* cache, const char* rows, const int64_t* slot_mapping, int64_t num_rows, int64_t row_bytes, int64_t row_stride) {
    parallel_for(num_rows, reading(2 * row_bytes), [&](int64_t t) {
        if (slot_mapping[t] >= 0) std::memcpy(cache + slot_mapping[t] * row_bytes, rows + t * row_stride, row_bytes);
    });
}

// Writes row t of `rows` [num_rows, num_heads, size], bfloat16 and `row_stride` numbers apart, to slot_mapping[t] of a cache of 8 bits; a
// negative slot is padding. See quantized_cache.h.
void penstock_quantize_rows(void* cache, const void* rows, const int64_t* slot_mapping, int64_t num_rows, int64_t num_heads, int64_t size,
                            int64_t block_size, int64_t row_stride) {
    parallel_for(num_rows, elementwise(4 * num_heads * size), [&](int64_t t) {
        const int64_t slot = slot_mapping[t];
        for (int64_t head = 0; head < num_heads && slot >= 0; ++head)
            CodeRows(cache, slot / block_size, head, num_heads, block_size, size)
                .write(slot % block_size, static_cast<const BFloat16*>(rows) + t * row_stride + head * size);
    });
}

// Row i of words (`words_stride` words apart) is for row rows[i] of logits (`logits_stride` numbers apart).
void penstock_apply_bitmask(float* logits, const uint32_t* words, const int64_t* rows, int64_t num_rows, int64_t vocab_size, int64_t num_words,
                            int64_t logits_stride, int64_t words_stride) {
    parallel_for(num_rows, elementwise(vocab_size), [&](int64_t i) {
        apply_bitmask_row(logits + rows[i] * logits_stride, words + i * words_stride, vocab_size, num_words);
    });
}

// query and out: [num_sequences, num_heads, size], contiguous. block_tables: [tables, table_width]; that of sequence i is row table_rows[i].
void penstock_paged_decode(void* out, const void* query, const void* key_cache, const void* value_cache, const int32_t* block_tables,
                           const int64_t* table_rows, const int64_t* context_lens, int64_t num_sequences, int64_t num_heads,
                           int64_t num_kv_heads, int64_t key_size, int64_t value_size, int64_t block_size, int64_t table_width,
                           int64_t is_bfloat16, int64_t is_quantized, float scaling, int64_t window, float softcap, const float* sinks) {
    const Shape shape{num_heads, num_kv_heads, key_size, value_size, block_size, is_quantized != 0};
    const BlockTables tables{block_tables, table_width, table_rows};
    const Options options{scaling, window, softcap, sinks};
    if (is_bfloat16) {
        decode_any<BFloat16>(out, query, key_cache, value_cache, tables, context_lens, num_sequences, shape, options);
    } else {
        decode_any<float>(out, query, key_cache, value_cache, tables, context_lens, num_sequences, shape, options);
    }
}

// Row i of logits lies `stride` numbers after the one before. token_ids: see `most_probable_of_rows`. words, which may be null: see `Allowed`.
void penstock_most_probable(int64_t* token_ids, const void* logits, int64_t num_rows, int64_t vocab_size, int64_t stride, int64_t is_bfloat16,
                            const uint32_t* words, int64_t num_words, int64_t words_stride) {
    if (is_bfloat16) {
        most_probable_of_rows(token_ids, static_cast<const BFloat16*>(logits), num_rows, vocab_size, stride, words, num_words, words_stride);
    } else {
        most_probable_of_rows(token_ids, static_cast<const float*>(logits), num_rows, vocab_size, stride, words, num_words, words_stride);
    }
}

// See `choose`.
void penstock_choose(int64_t* token_ids, const void* logits, int64_t vocab_size, int64_t stride, int64_t is_bfloat16, const uint32_t* words,
                     int64_t num_words, int64_t words_stride, const int64_t* integers, const double* reals, int64_t num_rows, int64_t num_reals,
                     const int64_t* counted, const float* counts, const int64_t* banned) {
    const auto run = [&](const auto* rows) {
        choose(token_ids, rows, vocab_size, stride, words, num_words, words_stride, integers, reals, num_rows, num_reals, counted, counts, banned);
    };
    is_bfloat16 ? run(static_cast<const BFloat16*>(logits)) : run(static_cast<const float*>(logits));
}

// See `most_probable_tokens`; -1 where a row's highest logit is not finite.
void penstock_most_probable_tokens(int64_t* token_ids, const void* head, const void* x, int64_t num_rows, const int64_t* drafted) {
    most_probable_tokens(token_ids, *static_cast<const GreedyHead*>(head), static_cast<const BFloat16*>(x), num_rows, drafted);
}

// out [num_rows, num_groups * 32] gets these rows of the weight that the blocks hold.
void penstock_quantized_rows(float* out, const uint8_t* blocks, const int64_t* rows, int64_t num_rows, int64_t num_groups, int64_t type) {
    with_type(type, [&](auto kind) { quantized_rows<decltype(kind)>(out, blocks, rows, num_rows, num_groups); });
}

// What of this processor the kernels were compiled for.
const char* penstock_instructions() {
#if defined(__AVX512BF16__)
    return "AVX-512 BF16";
#elif defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVX2__)
    return "AVX2";
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return "NEON BF16";
#elif defined(__aarch64__)
    return "NEON";
#else
    return "16-byte vectors";
#endif
}

// See `amx::choose`.
int64_t penstock_choose_tiles(int64_t mode) { return amx::choose(static_cast<amx::Mode>(mode)); }

// From how many rows on products go by tiles: with weights of bfloat16, of fewer bits, or of prompts' attention; -1: never.
int64_t penstock_tile_rows(int64_t product) {
    const int64_t rows[] = {amx::use.bfloat16_rows, amx::use.quantized_rows, amx::use.attention_rows};
    return rows[product] == amx::NEVER ? -1 : rows[product];
}

// See panel_linear.h; bias may be null.
void penstock_panel_linear(void* out, const void* x, const void* weight, const void* bias, int64_t num_rows, int64_t inputs, int64_t outputs) {
    panel_linear(static_cast<BFloat16*>(out), static_cast<const BFloat16*>(x), static_cast<const BFloat16*>(weight),
                 static_cast<const BFloat16*>(bias), num_rows, inputs, outputs);
}

// See float8_linear.h; bias may be null.
void penstock_float8_linear(void* out, const void* x, const Float8Panels* panels, const void* bias, int64_t num_rows, int64_t inputs,
                            int64_t outputs) {
    float8_linear(static_cast<BFloat16*>(out), static_cast<const BFloat16*>(x), *panels, static_cast<const BFloat16*>(bias), num_rows, inputs,
                  outputs);
}

// See `grouped_float8_linear`; bias may be null.
void penstock_grouped_float8_linear(void* out, const void* x, const Float8Panels* panels, const void* bias, const int64_t* starts,
                                    int64_t num_weights, int64_t inputs, int64_t outputs) {
    grouped_float8_linear(static_cast<BFloat16*>(out), static_cast<const BFloat16*>(x), *panels, static_cast<const BFloat16*>(bias), starts,
                          num_weights, inputs, outputs);
}

// out [num_rows, the parts' outputs] and x [num_rows, inputs] are contiguous and of one type, like bias, which may be null. inputs is a
// multiple of the columns of the parts' blocks.
void penstock_quantized_linear(void* out, const void* x, const QuantizedPart* parts, int64_t num_parts, const void* bias, int64_t num_rows,
                               int64_t inputs, int64_t is_bfloat16) {
    quantized_linear(out, x, parts, num_parts, bias, num_rows, inputs / GROUP, is_bfloat16);
}

// See `grouped_panel_linear`; bias may be null.
void penstock_grouped_panel_linear(void* out, const void* x, const void* weights, const void* bias, const int64_t* starts, int64_t num_weights,
                                   int64_t inputs, int64_t outputs) {
    grouped_panel_linear(static_cast<BFloat16*>(out), static_cast<const BFloat16*>(x), static_cast<const BFloat16*>(weights),
                         static_cast<const BFloat16*>(bias), starts, num_weights, inputs, outputs);
}

// See `grouped_linear`; x [starts[num_weights], inputs] and bias [num_weights, outputs], which may be null, are as of `penstock_quantized_linear`.
void penstock_grouped_linear(void* out, const void* x, const QuantizedPart* parts, const int64_t* strides, int64_t num_parts, const void* bias,
                             const int64_t* starts, int64_t num_weights, int64_t inputs, int64_t is_bfloat16) {
    grouped_linear(out, x, parts, strides, num_parts, bias, starts, num_weights, inputs / GROUP, is_bfloat16);
}

// See `run_decoder`; `packed` and `block_tables` are an AttentionMetadata's.
void penstock_run_decoder(void* out, const void* decoder, const int64_t* packed, const int32_t* block_tables, float* x, const int64_t* positions,
                          const int64_t* kept, int64_t table_width, int64_t num_kept) {
    const Step step(packed, block_tables, table_width);
    run_decoder(*static_cast<const Decoder*>(decoder), step, static_cast<BFloat16*>(out), x, positions, kept, num_kept);
}

// query and out: [num_tokens, num_heads, size], contiguous. Sequence i has the rows from query_starts[i] to query_starts[i + 1], its last
// tokens, whose keys are in the caches like all before them: context_lens[i] in all. key_size and value_size may be at most 256. key_stops,
// which may be null, are those of all tokens: see `Prefill`.
void penstock_paged_prefill(void* out, const void* query, const void* key_cache, const void* value_cache, const int32_t* block_tables,
                            const int64_t* table_rows, const int64_t* query_starts, const int64_t* context_lens, const int64_t* key_stops,
                            int64_t num_sequences, int64_t num_heads, int64_t num_kv_heads, int64_t key_size, int64_t value_size,
                            int64_t block_size, int64_t table_width, int64_t is_bfloat16, int64_t is_quantized, float scaling, int64_t window,
                            float softcap, const float* sinks) {
    const Options options{scaling, window, softcap, sinks};
    const BlockTables tables{block_tables, table_width, table_rows};
    auto run = [&](auto* element) {
        using T = std::remove_pointer_t<decltype(element)>;
        std::vector<Prefill<T>> sequences;
        for (int64_t i = 0; i < num_sequences; ++i)
            sequences.push_back({static_cast<T*>(out) + query_starts[i] * num_heads * value_size,
                                 static_cast<const T*>(query) + query_starts[i] * num_heads * key_size, static_cast<const T*>(key_cache),
                                 static_cast<const T*>(value_cache), tables[i],
                                 query_starts[i + 1] - query_starts[i], context_lens[i], num_heads, num_kv_heads, key_size, value_size,
                                 block_size, is_quantized != 0, options, key_stops ? key_stops + query_starts[i] : nullptr});
        prefill(sequences);
    };
    if (is_bfloat16) {
        run(static_cast<BFloat16*>(nullptr));
    } else {
        run(static_cast<float*>(nullptr));
    }
}
}
