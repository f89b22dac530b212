/* The C ABI of Paceline's CPU kernels. Nothing here prints or hands memory to the caller; pointers are borrowed for the
 * time of a call. Sizes are in elements unless they say bytes. All matrices are row-major, all floats fp32. */
#ifndef PACELINE_H
#define PACELINE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PL_API __attribute__((visibility("default")))

PL_API int32_t pl_abi(void); /* raised when anything below changes */

/* Instruction sets that this library was built with and this processor has, best first, separated by commas. */
PL_API const char* pl_backends(void);
PL_API const char* pl_backend(void);                  /* the one in use */
PL_API int32_t pl_use_backend(const char* name);      /* 0, or -1 if there is none of that name */
PL_API int32_t pl_set_threads(int32_t threads);       /* the caller included; returns the number in use */

/* ---- weights (pack.cpp). format: see src/formats.h ---- */

/* Bytes of `rows` x `columns` in our layout, or -1 if the format does not divide `columns`. */
PL_API int64_t pl_packed_bytes(int32_t format, int32_t rows, int32_t columns);
/* GGUF blocks, row after row, to our layout. */
PL_API void pl_pack(int32_t format, const void* stored, int32_t rows, int32_t columns, void* packed);
/* fp32 [rows, columns] to a format: q4_1 by a search for the scale and minimum of least squared error, q8_0 by rounding. */
PL_API int32_t pl_quantize(int32_t format, const float* weight, int32_t rows, int32_t columns, void* packed);
/* Rows `ids` [count] of a packed matrix as another packed matrix. */
PL_API void pl_take_rows(int32_t format, const void* packed, int32_t columns, const int64_t* ids, int32_t count, void* out);
/* Rows `ids` [count], dequantised: out [count, columns]. Each weight is computed as in src/formats.h, in fp32. */
PL_API void pl_dequantize_rows(
    int32_t format, const void* packed, int32_t columns, const int64_t* ids, int32_t count, float* out);

/* ---- linear ---- */

typedef struct {
    int32_t format, rows, columns, unused;
    const void* packed;
} pl_matrix;

/* Matrices of the same input, one below the other: rows of the parts add up (each part but the last: multiple of 16). */
typedef struct {
    int32_t parts, rows, columns, unused;
    pl_matrix part[3];
    const float* bias; /* [rows] or NULL */
} pl_linear;

/* out [count, linear.rows] = x [count, linear.columns] W^T + b; x is rounded to int8 in groups of 32.
 * work: pl_linear_work(count, columns) bytes, 64-byte aligned. */
PL_API int64_t pl_linear_work(int32_t count, int32_t columns);
PL_API void pl_linear_forward(const pl_linear* linear, const float* x, int32_t count, void* work, float* out);

/* x / sqrt(mean(x^2) + eps) * weight: rows [count, width]; out may be x. */
PL_API void pl_rms_norm(const float* x, int32_t count, int32_t width, const float* weight, float eps, float* out);

/* ---- one decoder layer ---- */

typedef struct {
    pl_linear qkv, output, gate_up, down; /* gate_up: two parts, gate and up */
    const float *attention_norm, *mlp_norm;       /* [hidden]; attention_norm may be NULL: the rows as they are */
    const float* embed_norm;                      /* [hidden] or NULL: of `beside` in layers that read it */
    const float *query_norm, *key_norm;           /* [head_dim] or NULL */
    const float *post_attention_norm, *post_mlp_norm; /* [hidden] or NULL */
    int32_t hidden, heads, kv_heads, head_dim, intermediate;
    int32_t activation; /* 0 silu, 1 gelu with tanh */
    int32_t window;     /* sliding window in positions, 0: none */
    float eps, scale;   /* of the norms; of the attention scores */
} pl_layer;

/* A flat ragged batch: rows of several sequences. Row i attends, in this order, to the slots
 * table[prefix_start .. + prefix_length) and then tail[tail_start .. + tail_length): its whole history and itself. */
typedef struct {
    int32_t rows, unused;
    const int32_t* slot;          /* [rows] where each row's key and value go */
    const int32_t* position;      /* [rows] into cos and sin */
    const int32_t* const* table;  /* [rows] slots of the row's sequence by position */
    const int32_t* prefix;        /* [rows] how many of `table` the row sees */
    const int32_t* const* tail;   /* [rows] slots behind those (a tree's ancestors and the row itself), or NULL */
    const int32_t* tail_length;   /* [rows] */
    const float* beside;          /* [rows, hidden] for layers whose qkv takes 2 * hidden inputs, else NULL */
    void* work;                   /* pl_layer_work bytes, 64-byte aligned */
} pl_batch;

/* Bytes that the two calls below need for `rows` rows. */
PL_API int64_t pl_layer_work(const pl_layer* layer, int32_t rows);

/* hidden [rows, H] += attention(norm(hidden)), or += attention([norm(beside); norm(hidden)]) where qkv is that wide.
 * keys, values: fp16 [slots, kv_heads, head_dim]; the rows' own are written.
 * cos, sin [positions, head_dim / 2], or NULL for a layer without rotary positions. */
PL_API void pl_attention(
    const pl_layer* layer, const pl_batch* batch, uint16_t* keys, uint16_t* values, const float* cos, const float* sin,
    float* hidden);
/* hidden [rows, H] += MLP(norm(hidden)). */
PL_API void pl_mlp(const pl_layer* layer, const pl_batch* batch, float* hidden);

/* What belongs to a layer and is no weight of it. */
typedef struct {
    uint16_t *keys, *values;
    const float *cos, *sin;
} pl_place;

/* Both of each layer in turn: layers, places [count]. kept [count]: where what goes into a layer is kept, [rows, H], or
 * NULL. */
PL_API void pl_layers(
    const pl_layer* const* layers, const pl_place* places, int32_t count, const pl_batch* batch, float* hidden,
    float* const* kept);

/* ---- scores ---- */

/* For each row of logits [rows, width]: the largest (the first of equals) and its probability, exp of it over the sum of
 * exp (NaN where none is above -infinity). Either output may be NULL. */
PL_API void pl_row_best(const float* logits, int32_t rows, int32_t width, int64_t* best, float* chance);

/* Each row of logits [rows, width] less its largest, divided by the temperature. */
PL_API void pl_temper(const float* logits, int32_t rows, int32_t width, float temperature, float* out);

/* A draw from softmax of each row of scores [rows, width], -infinity for tokens that cannot come: the column where score +
 * Gumbel noise is largest. The noise is that of the row's key words (keys [rows, 2], 32 bits each) and of the token a column
 * stands for: ids [width], or NULL for its own number. */
PL_API void pl_draw(
    const float* scores, int32_t rows, int32_t width, const int64_t* ids, const int64_t* keys, int64_t* drawn);

/* ---- a head's chain ---- */

/* An EAGLE-3 head of one layer (Li et al. 2025). A row's feature is fc(taps) or the output of the row before it; the layer
 * reads it behind the embedding of the row's token, and the output scores what follows. */
typedef struct {
    pl_layer layer;
    pl_linear fc, output;
    pl_matrix embedding;        /* of tokens, [V, hidden] */
    const float* residual_norm; /* [hidden] or NULL: features enter as they are */
    const float* output_norm;   /* [hidden], of what the output reads */
    const int64_t* ids;         /* [output.rows] the token that each score is of, or NULL: its own number */
    int32_t feeds_normed;       /* whether the next row's feature is what the output reads */
    int32_t unused;
} pl_head;

typedef struct {
    const float* taps;     /* [rows, fc.columns]: the target's hidden states */
    const int64_t* tokens; /* [rows] the token behind each */
    int32_t depth;         /* the most tokens to draft, 1 or more */
    float stop_below;      /* a token whose chance, times those of the tokens before it, is less gets no successor */
    float temperature;     /* 0: the likeliest tokens; else draws as in pl_draw, from scores divided by it */
    int32_t unused;
    const int64_t* keys;   /* [depth, 2] the noise of each, or NULL at temperature 0 */
    const float* worth;    /* [10] what counts as chance for each tenth of a token's probability, or NULL: itself */
} pl_draft;

/* Bytes of work that a chain behind `rows` rows needs. */
PL_API int64_t pl_chain_work(const pl_head* head, int32_t rows);

/* Feeds the batch's rows, then drafts token after token, each fed as one more row: the arrays of `batch` go on for
 * depth - 1 rows behind its own. Returns how many tokens came; their ids and probabilities: drafted, chance [depth]. */
PL_API int32_t pl_chain(
    const pl_head* head, const pl_batch* batch, const pl_draft* draft, uint16_t* keys, uint16_t* values, const float* cos,
    const float* sin, int64_t* drafted, float* chance);

/* ---- text that repeats (lookup.cpp) ---- */

/* Past text in a ring: position p is in slot p % capacity of `tokens` [slots], those below `oldest` are gone. A text lies in
 * pieces; behind one are two slots: -1, then -2 - the slot where the text goes on, or -1. */
typedef struct {
    const int32_t* tokens;
    int32_t slots, capacity, oldest;
    int32_t recent;      /* occurrences of an n-gram that count, the most recent ones */
    const int32_t* tail; /* [count] ids: the ending that is looked for */
    int32_t count, most; /* most: tokens to draft */
    double factor;       /* tokens to draft for each that matched */
    double floor;        /* a draft ends before its chance as a whole falls below this */
} pl_lookup;

/* Where n-grams of one length occurred (paceline/propose/ngram_chains.py). key: of the ending's last `length` ids. */
typedef struct {
    int32_t length, key, buckets, mask;
    const int32_t *bucket, *keys, *beside, *older;
} pl_chains;

/* What followed the ending before: ids and their chances, path and confidence [lookup.most], and the length of the match.
 * chains [lengths], shortest first. Returns how many. */
PL_API int32_t pl_suffix_lookup(
    const pl_lookup* lookup, const pl_chains* chains, int32_t lengths, int32_t* path, double* confidence, int32_t* matched);

/* The place behind the most recent of the longest earlier matches, of at most `longest` ids, of the ending of ids [count],
 * and its length; -1 if that is under `shortest`. */
PL_API int32_t pl_longest_match(const int64_t* ids, int32_t count, int32_t shortest, int32_t longest, int32_t* matched);

#ifdef __cplusplus
}
#endif
#endif
