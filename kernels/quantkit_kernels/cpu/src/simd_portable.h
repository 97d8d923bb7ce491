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
    // x is within -127..127; rounds to nearest even.
    static void to_i8(int8_t* p, F x) {
        const I codes = __builtin_convertvector(round(x), I);
        for (int i = 0; i < W; ++i) p[i] = static_cast<int8_t>(codes[i]);
    }
    static void to_f16(uint16_t* p, F x) {
        for (int i = 0; i < W; ++i) p[i] = float_to_half(x[i]);
    }

    // Eight 4-bit codes of each of W output rows; nibble<I> gives code I of each, divided by kNibbleUnit.
    using Nibbles = U;
    static constexpr float kNibbleUnit = 1.0f;
    static Nibbles load_nibbles(const uint32_t* p) {
        U v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
    template <int N>
    static F nibble(const Nibbles& v) {
        const I codes = reinterpret_cast<I>((v >> (4 * N)) & 15u) - 8;
        return __builtin_convertvector(codes, F);
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
