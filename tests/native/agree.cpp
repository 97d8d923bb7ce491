// Runs the native ops on random shapes and compares: every instruction set this processor has with the portable one, over
// integers and sampling the others bit by bit, and every size of team with one thread, bit by bit. It needs nothing but the library, so it
// runs under sanitizers and emulators, where Python does not.
//
//   quantkit_cpu_agree [rounds] [mask] [seed]      exits with 1 and a line for each thing that differs
//
// mask, where it is not 0: the instruction sets that must be found.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "args.h"

namespace {

std::mt19937_64 generator;  // not std's distributions: they differ from library to library

int between(int low, int high) { return low + static_cast<int>(generator() % static_cast<uint64_t>(high - low + 1)); }
template <class T>
T one_of(std::initializer_list<T> values) { return values.begin()[between(0, static_cast<int>(values.size()) - 1)]; }
float number() { return static_cast<float>(static_cast<double>(generator() >> 11) / 4503599627370496.0 - 1.0); }  // -1..1

using Floats = std::vector<float>;
using Ints = std::vector<int32_t>;
using Bytes = std::vector<int8_t>;
using Halves = std::vector<uint16_t>;

// A case owns its tensors, each of exactly its size, so that a sanitizer sees a step beyond it.
struct Case {
    std::string name;
    std::vector<Node> nodes;
    std::vector<std::shared_ptr<void>> kept;
    struct Output {
        void* data;
        size_t bytes;
        bool floats;       // else codes
        double tolerance;  // of the largest magnitude of the portable set's numbers; codes: steps
    };
    std::vector<Output> outputs;
    int tokens = 0, sequences = 0, rows = 0;
    bool integers = false;  // sums are exact: sets that round a · b + c once give the same bits

    template <class V>
    typename V::value_type* keep(V values) {
        auto held = std::make_shared<V>(std::move(values));
        kept.push_back(held);
        return held->data();
    }
    float* floats(int64_t count, float scale = 1.0f) {
        Floats values(static_cast<size_t>(count));
        for (float& x : values) x = number() * scale;
        return keep(std::move(values));
    }
    float* positive(int64_t count, float low, float high) {
        Floats values(static_cast<size_t>(count));
        for (float& x : values) x = low + (high - low) * (number() + 1.0f) / 2.0f;
        return keep(std::move(values));
    }
    int8_t* codes(int64_t count, int low, int high) {
        Bytes values(static_cast<size_t>(count));
        for (int8_t& x : values) x = static_cast<int8_t>(between(low, high));
        return keep(std::move(values));
    }
    // Small finite 16-bit floats, half or bfloat: any exponent field up to that of about one.
    uint16_t* halves(int64_t count, bool brain) {
        Halves values(static_cast<size_t>(count));
        for (uint16_t& x : values) {
            const int sign = between(0, 1) << 15;
            x = static_cast<uint16_t>(sign | (brain ? between(110, 126) << 7 | between(0, 127) : between(0, 14) << 10 | between(0, 1023)));
        }
        return keep(std::move(values));
    }
    float* output(int64_t count, double tolerance) {
        float* data = keep(Floats(static_cast<size_t>(count)));
        outputs.push_back({data, sizeof(float) * static_cast<size_t>(count), true, tolerance});
        return data;
    }
    int8_t* code_output(int64_t count, double steps) {
        int8_t* data = keep(Bytes(static_cast<size_t>(count)));
        outputs.push_back({data, static_cast<size_t>(count), false, steps});
        return data;
    }
    Node& add(int op, int capacity) {
        Node node{};
        node.op = op;
        node.i[14] = capacity;
        nodes.push_back(node);
        return nodes.back();
    }
    void fill(Node& node, std::initializer_list<void*> pointers, std::initializer_list<int32_t> ints, std::initializer_list<float> numbers = {}) {
        std::copy(pointers.begin(), pointers.end(), node.p);
        std::copy(ints.begin(), ints.end(), node.i);
        std::copy(numbers.begin(), numbers.end(), node.f);
    }
};

int up(int a, int b) { return (a + b - 1) / b * b; }

// What quantize_rows writes, for rows of `groups` times `group` channels.
struct Quantized {
    int8_t* codes;
    float* scale;
    int32_t* sum;
};
Quantized quantized(Case& c, int rows, int groups, int group, double steps) {
    const int padded = up(rows, 16), blocks = groups * ((group + 127) / 128);
    // Padding and rows that are not there are read by matrix tiles; their results are dropped.
    Quantized q{c.code_output(int64_t{padded} * groups * up(group, 64), steps), c.output(int64_t{padded} * blocks, 1e-6), c.keep(Ints(static_cast<size_t>(padded) * blocks))};
    return q;
}

// A weight [n, k] in `groups` groups, packed, as fields 1..3 of p and 0..4 of i.
void product(Case& c, bool head) {
    const int dtype = one_of<int>({kF32, kF16, kBF16, kI8, kI4}), scale_dtype = one_of<int>({kF32, kF16, kBF16});
    const bool holds_codes = dtype == kI8 || dtype == kI4, as_codes = holds_codes && between(0, 2) > 0;
    const int groups = holds_codes ? between(1, 4) : 1, group = one_of({8, 24, 32, 64, 80, 128, 130, 192, 257});
    const int k = groups * group, n = between(1, 130), tokens = one_of({1, 2, 3, 5, 8, 9, 16, 17, 40, 200, 400});
    const int rows = head ? between(1, tokens) : tokens, panels = up(n, 32) / 32;
    c.name = std::string(head ? "logits" : "linear") + " dtype " + std::to_string(dtype) + " n " + std::to_string(n) + " k " + std::to_string(k) +
             " groups " + std::to_string(groups) + " rows " + std::to_string(rows) + (as_codes ? " of codes" : "");
    c.tokens = tokens;
    c.integers = as_codes;
    c.rows = head ? rows : 0;
    const void* weight = dtype == kF32    ? static_cast<void*>(c.floats(int64_t{n} * k))
                         : holds_codes    ? static_cast<void*>(c.codes(int64_t{n} * k, dtype == kI4 ? -8 : -127, dtype == kI4 ? 7 : 127))
                                          : static_cast<void*>(c.halves(int64_t{n} * k, dtype == kBF16));
    Bytes packed(static_cast<size_t>(qk_packed_bytes(dtype, n, k, groups)));
    qk_pack(dtype, weight, n, k, groups, packed.data());
    void* scale = nullptr;
    if (holds_codes) {
        const int64_t count = int64_t{panels} * groups * 32;
        scale = scale_dtype == kF32 ? static_cast<void*>(c.positive(count, 0.001f, 0.1f)) : static_cast<void*>(c.halves(count, scale_dtype == kBF16));
    }
    void* zero = dtype == kI4 && between(0, 1) ? c.codes(int64_t{panels} * groups * 32, -8, 7) : nullptr;
    float* x = c.floats(int64_t{tokens} * k);
    int32_t* picked = nullptr;
    if (head) {
        Ints rows_of(static_cast<size_t>(rows));
        for (int32_t& row : rows_of) row = between(0, tokens - 1);
        picked = c.keep(std::move(rows_of));
    }
    Quantized q{};
    if (as_codes) {
        q = quantized(c, rows, groups, group, 0);
        c.fill(c.add(kQuantizeRows, rows), {x, picked, q.codes, q.scale, q.sum}, {k, groups, tokens, head});
    }
    float* bias = !head && between(0, 1) ? c.floats(n) : nullptr;
    float* out = c.output(int64_t{rows} * n, 2e-5);
    c.fill(c.add(head ? kLogits : kLinear, rows), {x, c.keep(std::move(packed)), scale, zero, bias, out, picked, q.codes, q.scale, q.sum},
           {k, n, groups, dtype, scale_dtype, tokens}, {head && between(0, 1) ? 5.0f : 0.0f});
}

void row_ops(Case& c) {
    const int width = between(1, 700), tokens = one_of({1, 3, 17, 300}), vocab = between(1, 50), table_dtype = one_of<int>({kF32, kF16, kBF16});
    c.name = "rows of " + std::to_string(width) + ", " + std::to_string(tokens);
    c.tokens = tokens;
    const int64_t size = int64_t{tokens} * width;
    Ints ids(static_cast<size_t>(tokens));
    for (int32_t& id : ids) id = between(0, vocab - 1);
    void* table = table_dtype == kF32 ? static_cast<void*>(c.floats(int64_t{vocab} * width)) : static_cast<void*>(c.halves(int64_t{vocab} * width, table_dtype == kBF16));
    float* embedded = c.output(size, 1e-6);
    c.fill(c.add(kEmbedding, tokens), {c.keep(std::move(ids)), table, embedded}, {width, vocab, table_dtype}, {1.5f});
    float *normed = c.output(size, 2e-5), *sum = c.output(size, 1e-6), *again = c.output(size, 2e-5);
    float *residual = c.floats(size), *weight = c.floats(width);
    Node& norm = c.add(kAddRmsNorm, tokens);
    c.fill(norm, {embedded, residual, weight, normed, sum}, {width}, {1e-5f, 1.0f});
    if (width % 2 == 0 && between(0, 1)) {  // it quantizes its own rows as well
        const Quantized q = quantized(c, tokens, 2, width / 2, 1);
        Node& last = c.nodes.back();
        last.p[8] = q.codes;
        last.p[9] = q.scale;
        last.p[10] = q.sum;
        last.i[8] = 2;
    }
    c.fill(c.add(kRmsNorm, tokens), {normed, nullptr, weight, again, nullptr}, {width}, {1e-6f, 0.0f});
    c.fill(c.add(kAdd, tokens), {again, sum, c.output(size, 2e-5)}, {width});
    float* gate_up = c.floats(2 * size, 6.0f);
    c.fill(c.add(kGatedAct, tokens), {gate_up, c.output(size, 2e-5)}, {width, between(0, 1)});
}

// New keys and values as a cache in each format keeps them: the same bytes on every set.
void cache_write(Case& c) {
    const int kv_heads = between(1, 2), head_dim = 8 * between(1, 20), tokens = one_of({1, 3, 17, 40}), block_size = 16;
    const int dtype = one_of<int>({kF32, kF16, kBF16, kI8, kI4, kF8}), blocks = tokens / block_size + 2, half = head_dim / 2;
    c.name = "cache write " + std::to_string(kv_heads) + " × " + std::to_string(head_dim) + ", dtype " + std::to_string(dtype);
    c.tokens = tokens;
    Ints positions(static_cast<size_t>(tokens)), slots(static_cast<size_t>(tokens));
    for (int t = 0; t < tokens; ++t) {
        positions[static_cast<size_t>(t)] = t;
        slots[static_cast<size_t>(t)] = between(0, 9) ? t + block_size : -1;
    }
    const int64_t width = int64_t{3} * kv_heads * head_dim, bytes = int64_t{blocks} * kv_heads * block_size * cell_bytes(dtype, head_dim);
    float* qkv = c.floats(tokens * width);
    for (int64_t i = 0; i < tokens * width; ++i) qkv[i] = std::ldexp(qkv[i], between(-12, 10));
    float *k_scale = c.positive(int64_t{kv_heads} * head_dim, 0.005f, 2.0f), *v_scale = c.positive(int64_t{kv_heads} * head_dim, 0.005f, 2.0f);
    c.fill(c.add(kQkNormRopeKvWrite, tokens),
           {qkv, c.keep(std::move(positions)), c.keep(std::move(slots)), c.floats(int64_t{tokens} * half), c.floats(int64_t{tokens} * half), nullptr,
            nullptr, c.code_output(bytes, 0), c.code_output(bytes, 0), k_scale, v_scale, c.output(int64_t{tokens} * kv_heads * head_dim, 1e-6)},
           {kv_heads, kv_heads, head_dim, half, dtype, block_size, blocks, tokens}, {1e-6f, 0.0f});
}

// New keys and values go into a paged cache that holds others already, then its queries are answered.
void attention(Case& c) {
    const int kv_heads = between(1, 3), group = one_of({1, 2, 3, 5, 8, 50}), heads = kv_heads * group, head_dim = one_of({8, 32, 64, 80, 96, 128, 256});
    const int block_size = one_of({1, 16, 32}), sequences = between(1, 4), dtype = one_of<int>({kF32, kF16, kBF16, kI8, kI4, kF8});
    const bool decode = between(0, 1);
    Ints fresh, lens, start{0};
    int longest = 0;
    for (int b = 0; b < sequences; ++b) {
        fresh.push_back(decode ? 1 : one_of({0, 1, 2, 7, 33, 70}));
        lens.push_back(fresh[b] + (between(0, 3) ? between(0, 90) : between(500, 1300)));
        start.push_back(start[b] + fresh[b]);
        longest = std::max(longest, lens[b]);
    }
    const int tokens = start[sequences], width = (longest + block_size - 1) / block_size, blocks = sequences * width + 1;
    c.name = "attention " + std::to_string(heads) + "/" + std::to_string(kv_heads) + " × " + std::to_string(head_dim) + ", dtype " + std::to_string(dtype) +
             ", blocks of " + std::to_string(block_size) + ", longest " + std::to_string(longest) + (decode ? ", decode" : "");
    c.tokens = tokens;
    const bool coarse = dtype == kI4 || dtype == kF8;  // whose steps show in the result where a norm's last bit moves a code
    const bool scaled = coarse || dtype == kI8, normed = !coarse && between(0, 1);
    c.integers = dtype == kI8 && !normed;  // a norm sums in the order of its vectors
    c.sequences = sequences;
    Ints order(static_cast<size_t>(blocks)), table(static_cast<size_t>(sequences) * width), positions, slots;
    for (int b = 0; b < blocks; ++b) order[static_cast<size_t>(b)] = b;
    for (int b = blocks - 1; b > 0; --b) std::swap(order[static_cast<size_t>(b)], order[static_cast<size_t>(between(0, b))]);
    std::copy(order.begin(), order.begin() + sequences * width, table.begin());
    for (int b = 0; b < sequences; ++b) {
        for (int i = 0; i < fresh[b]; ++i) {
            const int at = lens[b] - fresh[b] + i;
            positions.push_back(at);
            slots.push_back(table[static_cast<size_t>(b * width + at / block_size)] * block_size + at % block_size);
        }
    }
    const int64_t places = int64_t{blocks} * kv_heads * block_size, cells = places * head_dim;
    const auto cache = [&]() -> void* {
        if (dtype == kF32) return c.floats(cells);
        if (dtype == kF8) {
            int8_t* codes = c.codes(cells, -127, 126);
            for (int64_t i = 0; i < cells; ++i) codes[i] = (codes[i] & 0x7f) == 0x7f ? int8_t{0} : codes[i];  // no NaN
            return codes;
        }
        if (dtype == kI4) {
            const int64_t cell = cell_bytes(kI4, head_dim);
            int8_t* held = c.codes(places * cell, -128, 127);
            for (int64_t place = 0; place < places; ++place) {  // scales and minima that are numbers
                for (int64_t at = head_dim / 2; at < cell; at += 2) {
                    const auto half = static_cast<uint16_t>(between(0, 1) << 15 | between(0, 0x3fff));
                    std::memcpy(held + place * cell + at, &half, sizeof half);
                }
            }
            return held;
        }
        return dtype == kI8 ? static_cast<void*>(c.codes(cells, -127, 127)) : static_cast<void*>(c.halves(cells, dtype == kBF16));
    };
    void *keys = cache(), *values = cache();
    float* k_scale = scaled ? c.positive(int64_t{kv_heads} * head_dim, 0.005f, 0.01f) : nullptr;
    float* v_scale = scaled ? c.positive(int64_t{kv_heads} * head_dim, 0.005f, 0.01f) : nullptr;
    const int half = between(0, 1) ? head_dim / 2 : head_dim / 4, all_positions = longest;
    float* q = c.output(int64_t{tokens} * heads * head_dim, 2e-5);
    c.fill(c.add(kQkNormRopeKvWrite, tokens),
           {c.floats(int64_t{tokens} * (heads + 2 * kv_heads) * head_dim), c.keep(std::move(positions)), c.keep(std::move(slots)),
            c.floats(int64_t{all_positions} * half), c.floats(int64_t{all_positions} * half), normed ? c.floats(head_dim) : nullptr,
            normed ? c.floats(head_dim) : nullptr, keys, values, k_scale, v_scale, q},
           {heads, kv_heads, head_dim, half, dtype, block_size, blocks, all_positions}, {1e-6f, 0.0f});
    // The cache is written anew with the same bits whichever run comes first, within a rounding between sets.
    c.fill(c.add(kPagedAttention, tokens),
           {q, keys, values, k_scale, v_scale, c.keep(std::move(table)), c.keep(std::move(start)), c.keep(std::move(lens)), c.output(int64_t{tokens} * heads * head_dim, 2e-3)},
           {heads, kv_heads, head_dim, dtype, block_size, blocks, width, between(0, 3) ? 0 : between(1, 600), sequences},
           {1.0f / std::sqrt(static_cast<float>(head_dim)), between(0, 4) ? 0.0f : 20.0f});
}

using Results = std::vector<Bytes>;
bool failed = false;

void complain(const Case& c, const std::string& what) {
    std::printf("DIFFERS %s: %s\n", c.name.c_str(), what.c_str());
    failed = true;
}

struct Destroy {
    void operator()(List* list) const { qk_list_destroy(list); }
};
using Handle = std::unique_ptr<List, Destroy>;

Handle made(const Case& c, int isa, int threads) {
    Handle list(qk_list_create(c.nodes.data(), static_cast<int32_t>(c.nodes.size()), isa, threads));
    if (!list) complain(c, qk_last_error());
    return list;
}

// Outputs are filled with NaN or nonsense before, so that what is not written shows.
Results run(const Case& c, List* list) {
    for (const Case::Output& out : c.outputs) {
        if (out.bytes) std::memset(out.data, out.floats ? 0xff : 0x55, out.bytes);
    }
    if (qk_list_run(list, c.tokens, c.sequences, c.rows)) complain(c, qk_last_error());
    Results results;
    for (const Case::Output& out : c.outputs) results.emplace_back(static_cast<int8_t*>(out.data), static_cast<int8_t*>(out.data) + out.bytes);
    return results;
}

void compare(const Case& c, const Results& wanted, const Results& got, int isa) {
    for (size_t o = 0; o < wanted.size(); ++o) {
        const Case::Output& out = c.outputs[o];
        double worst = 0, largest = 1e-30;
        if (!out.floats) {
            for (size_t i = 0; i < out.bytes; ++i) worst = std::max(worst, std::fabs(double(wanted[o][i]) - got[o][i]));
            if (worst > out.tolerance) complain(c, "codes " + std::to_string(o) + " differ by " + std::to_string(worst) + " on isa " + std::to_string(isa));
            continue;
        }
        const auto* a = reinterpret_cast<const float*>(wanted[o].data());
        const auto* b = reinterpret_cast<const float*>(got[o].data());
        for (size_t i = 0; i < out.bytes / 4; ++i) {
            if (std::isnan(a[i]) && std::isnan(b[i])) continue;  // rows of padding, which neither writes
            if (std::isnan(a[i]) != std::isnan(b[i])) worst = INFINITY;
            largest = std::max(largest, std::fabs(double(a[i])));
            worst = std::max(worst, std::fabs(double(a[i]) - b[i]));
        }
        if (worst > out.tolerance * largest) {
            complain(c, "numbers " + std::to_string(o) + " differ by " + std::to_string(worst) + " of " + std::to_string(largest) + " on isa " + std::to_string(isa));
        }
    }
}

void check(const Case& c) {
    const Results portable = run(c, made(c, 1, 1).get());
    Results fused;
    for (int isa = 1; isa <= qk_isa_mask(); isa *= 2) {
        if (!(qk_isa_mask() & isa)) continue;
        const Results alone = run(c, made(c, isa, 1).get());
        compare(c, portable, alone, isa);
        if (c.integers && isa > 1) {
            if (fused.empty()) fused = alone;
            if (fused != alone) complain(c, "isa " + std::to_string(isa) + " gives other bits than those before it");
        }
        for (int threads : {2, 3, 5}) {
            const Handle list = made(c, isa, threads);
            for (int time = 0; time < 2; ++time) {
                if (run(c, list.get()) != alone) complain(c, "its bits depend on the team: " + std::to_string(threads) + " threads, isa " + std::to_string(isa));
            }
        }
    }
}

// Rows of logits and how each is drawn; a sampler's answers are the same bits on every instruction set and team.
struct Draws {
    Case held;  // its tensors
    int vocab = 0, most = 0;
    float* logits = nullptr;
    std::vector<SampleRow> rows;
};

Draws draws() {
    Draws d;
    d.vocab = one_of({1, 5, 16, 127, 128, 129, 1000, 5003, 20000});
    const int count = one_of({1, 2, 3, 17});
    d.held.name = "sampling " + std::to_string(count) + " of " + std::to_string(d.vocab);
    d.logits = d.held.floats(int64_t{count} * d.vocab, one_of({0.0f, 0.1f, 3.0f, 20.0f}));
    if (!between(0, 3)) {
        for (int64_t i = 0; i < int64_t{count} * d.vocab; ++i) d.logits[i] = std::floor(d.logits[i]);  // ties
    }
    for (int spoilt = between(0, 2); spoilt > 0; --spoilt) {
        d.logits[between(0, count * d.vocab - 1)] = one_of({-INFINITY, -INFINITY, INFINITY, static_cast<float>(NAN), 3e38f});
    }
    d.most = one_of({0, 1, 20});
    const auto ids = [&](int size) {
        Ints held(static_cast<size_t>(size));
        for (int32_t& id : held) id = between(0, d.vocab - 1);
        return d.held.keep(std::move(held));
    };
    for (int row = 0; row < count; ++row) {
        SampleRow how{};
        how.biases = between(0, 1);
        how.bias_ids = ids(how.biases);
        how.bias = d.held.floats(how.biases, 50.0f);
        how.length = one_of({0, 0, 30});
        how.prompt = between(0, how.length);
        how.tokens = ids(how.length);
        how.bans = between(0, 2);
        how.banned = ids(how.bans);
        how.repetition = one_of({1.0, 1.3, 0.5, 1e300});
        how.presence = one_of({0.0f, 1.5f});
        how.frequency = one_of({0.0f, -0.3f});
        how.temperature = one_of({0.0, 1.1e-5, 0.7, 1.0, 5.0, 1e300});
        how.top_k = one_of({0, 0, 1, 40, d.vocab / 2, d.vocab, INT32_MAX});
        how.logprobs = between(-1, 1) < 0 ? -1 : between(0, d.most);
        how.top_p = one_of({1.0, 0.95, 0.5, 1e-9});
        how.min_p = one_of({0.0, 0.05, 1.0});
        how.seed = generator();
        how.position = generator();
        d.rows.push_back(how);
    }
    return d;
}

Bytes drawn(const Draws& d, int isa, int threads) {
    const auto destroy = [](Sampler* sampler) { qk_sampler_destroy(sampler); };
    const std::unique_ptr<Sampler, decltype(destroy)> sampler(qk_sampler_create(d.vocab, isa, threads), destroy);
    const size_t count = d.rows.size(), most = static_cast<size_t>(d.most);
    Ints tokens(count, -7), top_ids(count * most, -7);
    std::vector<double> logprobs(count * (1 + most), -7.0);
    for (int time = 0; time < 2; ++time) {
        if (!sampler || qk_sampler_run(sampler.get(), d.logits, d.rows.data(), static_cast<int32_t>(count), d.most, tokens.data(), logprobs.data(), top_ids.data())) {
            complain(d.held, qk_last_error());
            return {};
        }
    }
    Bytes all;
    const auto append = [&all](const auto& values) {
        const auto* first = reinterpret_cast<const int8_t*>(values.data());
        all.insert(all.end(), first, first + values.size() * sizeof values[0]);
    };
    append(tokens);
    append(logprobs);
    append(top_ids);
    return all;
}

void check(const Draws& d) {
    const Bytes wanted = drawn(d, 1, 1);
    for (int isa = 1; isa <= qk_isa_mask(); isa *= 2) {
        for (int threads : {1, 2, 5}) {
            if (!(qk_isa_mask() & isa) || drawn(d, isa, threads) == wanted) continue;
            complain(d.held, "other tokens with " + std::to_string(threads) + " threads on isa " + std::to_string(isa));
        }
    }
}

// Lists of several callers at once: they share teams, and each finds what it finds alone.
void check_together(const std::vector<Case>& cases) {
    const int isa = 1 << static_cast<int>(std::log2(qk_isa_mask()));
    std::vector<Results> wanted;
    std::vector<Handle> lists;
    for (const Case& c : cases) {
        lists.push_back(made(c, isa, 3));
        wanted.push_back(run(c, lists.back().get()));
    }
    std::vector<std::thread> callers;
    std::vector<int> differ(cases.size(), 0);
    for (size_t i = 0; i < cases.size(); ++i) {
        callers.emplace_back([&, i] {
            for (int time = 0; time < 8; ++time) differ[i] += run(cases[i], lists[i].get()) != wanted[i];
        });
    }
    for (std::thread& caller : callers) caller.join();
    for (size_t i = 0; i < cases.size(); ++i) {
        if (differ[i]) complain(cases[i], "other callers at the same time change its bits");
    }
}

}  // namespace

int main(int count, char** words) {
    const int rounds = count > 1 ? std::atoi(words[1]) : 60;
    const int wanted = count > 2 ? std::atoi(words[2]) : 0;
    const uint64_t seed = count > 3 ? std::strtoull(words[3], nullptr, 10) : std::random_device{}();
    std::printf("isa mask %d, %d rounds, seed %llu\n", qk_isa_mask(), rounds, static_cast<unsigned long long>(seed));
    if (wanted && wanted != qk_isa_mask()) {
        std::printf("DIFFERS: the mask must be %d\n", wanted);
        failed = true;
    }
    std::fflush(stdout);
    generator.seed(seed);
    for (int round = 0; round < rounds && !failed; ++round) {
        std::vector<Case> cases(5);
        product(cases[0], false);
        product(cases[1], true);
        row_ops(cases[2]);
        attention(cases[3]);
        cache_write(cases[4]);
        for (const Case& c : cases) check(c);
        for (int time = 0; time < 5; ++time) check(draws());
        check_together(cases);
    }
    std::puts(failed ? "FAILED" : "all agree");
    return failed ? 1 : 0;
}
