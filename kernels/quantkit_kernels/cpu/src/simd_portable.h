// Vector primitives in the compiler's generic vectors: 4 floats, no instruction-set flags. Also the definition of
// what the other units' primitives mean.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "convert.h"

namespace {

struct Simd {
    static constexpr int W = 4;
    static constexpr int kRegisters = 16;
    typedef float F __attribute__((vector_size(16)));
    typedef int32_t I __attribute__((vector_size(16)));
    typedef uint32_t U __attribute__((vector_size(16)));

    static F zero() { return F{0, 0, 0, 0}; }
    static F set(float x) { return F{x, x, x, x}; }
    static F load(const float* p) {
        F x;
        std::memcpy(&x, p, sizeof x);
        return x;
    }
    static void store(float* p, F x) { std::memcpy(p, &x, sizeof x); }
    // The first n lanes; the rest read as zero and are not written.
    static F load_n(const float* p, int n) {
        F x = zero();
        for (int i = 0; i < n; ++i) x[i] = p[i];
        return x;
    }
    static void store_n(float* p, F x, int n) {
        for (int i = 0; i < n; ++i) p[i] = x[i];
    }

    static F add(F a, F b) { return a + b; }
    static F sub(F a, F b) { return a - b; }
    static F mul(F a, F b) { return a * b; }
    static F div(F a, F b) { return a / b; }
    static F fma(F a, F b, F c) { return a * b + c; }  // one rounding where the hardware has it, two here
    // The second operand where either is not a number, so that a bound on the left lets NaN through.
    static F min(F a, F b) { return a < b ? a : b; }
    static F max(F a, F b) { return a > b ? a : b; }
    static float sum(F x) { return (x[0] + x[2]) + (x[1] + x[3]); }
    static float highest(F x) {
        const float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
        return a > b ? a : b;
    }

    // To the nearest integer, ties to even, for |x| < 2^22.
    static F round(F x) {
        const F magic = set(12582912.0f);
        return (x + magic) - magic;
    }
    static F power_of_two(F n) { return reinterpret_cast<F>((__builtin_convertvector(n, I) + 127) << 23); }
    // x · 2^n where neither x nor the result is zero or subnormal.
    static F times_power_of_two(F x, F n) { return reinterpret_cast<F>(reinterpret_cast<I>(x) + (__builtin_convertvector(n, I) << 23)); }
    // y, but exactly zero in lanes where x < limit.
    static F zero_below(F x, F limit, F y) { return x < limit ? zero() : y; }
    // x in lanes lo <= i < hi, else other.
    static F keep_lanes(F x, F other, int lo, int hi) {
        const I lane = {0, 1, 2, 3};
        const I keep = (lane >= lo) & (lane < hi);
        return keep ? x : other;
    }

    static F from_i8(const int8_t* p) {
        return F{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]), static_cast<float>(p[3])};
    }
    static F from_f16(const uint16_t* p) {
        return F{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
    }
    static F from_bf16(const uint16_t* p) {
        return F{bf16_to_float(p[0]), bf16_to_float(p[1]), bf16_to_float(p[2]), bf16_to_float(p[3])};
    }
    static F set_f16(uint16_t x) { return set(half_to_float(x)); }
    // e4m3 (float_to_f8 of convert.h).
    static F from_f8(const uint8_t* p) {
        F x;
        for (int i = 0; i < W; ++i) x[i] = f8_to_float(p[i]);
        return x;
    }
    // The low and the high nibbles of W bytes, 0..15.
    static void from_nibbles(const uint8_t* p, F* low, F* high) {
        for (int i = 0; i < W; ++i) {
            (*low)[i] = static_cast<float>(p[i] & 15);
            (*high)[i] = static_cast<float>(p[i] >> 4);
        }
    }
    static void to_f16(uint16_t* p, F x) {
        for (int i = 0; i < W; ++i) p[i] = float_to_half(x[i]);
    }

    // A word of 32 bits of each of W output rows, as pack.cpp lays them: eight 4-bit codes or four of 8 bits. nibble<N>
    // and byte<N> give channel N of each as a float, divided by the unit.
    static U load_words(const uint32_t* p) {
        U v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
    using Nibbles = U;
    static constexpr float kNibbleUnit = 1.0f, kByteUnit = 1.0f;
    static Nibbles load_nibbles(const uint32_t* p) { return load_words(p); }
    template <int N>
    static F nibble(const Nibbles& v) {
        const I codes = reinterpret_cast<I>((v >> (N < 4 ? 8 * N : 8 * (N - 4) + 4)) & 15u) - 8;
        return __builtin_convertvector(codes, F);
    }
    template <int N>
    static F byte(const U& v) {
        return __builtin_convertvector(reinterpret_cast<I>(v << (24 - 8 * N)) >> 24, F);
    }

    // Integer dot products. dot4 and dot8 add, for each of W output rows, the products of four channels with the int8
    // codes at x: open8 makes them of a word, open4 of its low or high nibbles (H), raised by kBias4 or kBias8 as far as
    // the sums are concerned: open() takes what that adds, negated. A step of kStep channels is led in by start(), with
    // what start_of() made of its row's codes, and ended by flush().
    static constexpr int kBias4 = 8, kBias8 = 0;
    static int32_t start_of(const int8_t*) { return 0; }
    static I int_set(int32_t x) { return I{x, x, x, x}; }
    static I int_add(I a, I b) { return a + b; }
    static I int_sub(I a, I b) { return a - b; }
    static I int_mul(I a, I b) { return a * b; }
    static I int_from_i8(const int8_t* p) { return I{p[0], p[1], p[2], p[3]}; }
    // To the nearest integer, ties to even; |x| < 2^22.
    static I to_int(F x) { return __builtin_convertvector(round(x), I); }
    static int32_t int_sum(I x) { return x[0] + x[1] + x[2] + x[3]; }
    static void store_shorts(int16_t* p, I x) {
        for (int i = 0; i < W; ++i) p[i] = static_cast<int16_t>(x[i]);
    }
    // Lanes within -128..127 as bytes.
    static void store_bytes(int8_t* p, I x) {
        for (int i = 0; i < W; ++i) p[i] = static_cast<int8_t>(x[i]);
    }
    // Sums of products of pairs of 16-bit numbers: [W][2] at k with the pair at q, added to sum.
    static I dot_pairs(I sum, const int16_t* k, const int16_t* q) {
        for (int i = 0; i < W; ++i) {  // columns that are masked later may hold anything, so the sum may wrap
            sum[i] = static_cast<int32_t>(static_cast<uint32_t>(sum[i]) + static_cast<uint32_t>(k[2 * i] * q[0] + k[2 * i + 1] * q[1]));
        }
        return sum;
    }
    // Bytes of two channels for 16 positions, side by side as 16-bit pairs [16][2].
    static void pair_bytes(const int8_t* even, const int8_t* odd, int16_t* out) {
        for (int i = 0; i < 16; ++i) {
            out[2 * i] = even[i];
            out[2 * i + 1] = odd[i];
        }
    }
    static F to_float(I x) { return __builtin_convertvector(x, F); }
    struct Sum {
        I total;
        void open(int32_t less) { total = int_set(less); }
        void start(int32_t) {}
        void flush() {}
        void add(I more) { total = int_add(total, more); }
        I value() const { return total; }
    };
    using Sum4 = Sum;
    using Sum8 = Sum;
    template <int H>
    static U open4(U v) {
        return (v >> (4 * H)) & 0x0f0f0f0fu;
    }
    static U open8(U v) { return v; }
    static void dot4(Sum4& sum, const U& w, const int8_t* x) {
        dot8(sum, w, x);
    }
    static void dot8(Sum8& sum, const U& w, const int8_t* x) {
        for (int i = 0; i < 4; ++i) sum.total += (reinterpret_cast<I>(w << (24 - 8 * i)) >> 24) * x[i];
    }

    // Transposes bytes `column`.. of 16 rows, 16 · lanes of them (at most kByteColumns), to out [16][lanes][16]: byte
    // (d, lane) of each row, in row order, for column + 16 · lane + d.
    static constexpr int kByteColumns = 16;
    static void transpose_bytes(const int8_t* const* rows, int column, int lanes, int8_t* out) {
        for (int d = 0; d < 16; ++d) {
            for (int lane = 0; lane < lanes; ++lane) {
                for (int r = 0; r < 16; ++r) out[(d * lanes + lane) * 16 + r] = rows[r][column + 16 * lane + d];
            }
        }
    }
    static void transpose_4x4(const float* in, int64_t ld_in, float* out, int64_t ld_out) {
        for (int r = 0; r < 4; ++r) {
            for (int c = 0; c < 4; ++c) out[c * ld_out + r] = in[r * ld_in + c];
        }
    }
};

}  // namespace
