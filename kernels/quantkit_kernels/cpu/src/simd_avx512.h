// Vector primitives, AVX-512 (F, BW, DQ, VL): 16 floats. See simd_portable.h for what each one means.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "args.h"

namespace {

struct Simd {
    static constexpr int W = 16;
    static constexpr int kRegisters = 32;
    using F = __m512;

    static F zero() { return _mm512_setzero_ps(); }
    static F set(float x) { return _mm512_set1_ps(x); }
    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    static __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }
    static F load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
    static void store_n(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }

    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F min(F a, F b) { return _mm512_min_ps(a, b); }
    static F max(F a, F b) { return _mm512_max_ps(a, b); }
    static float sum(F x) { return _mm512_reduce_add_ps(x); }
    static float highest(F x) { return _mm512_reduce_max_ps(x); }

    static F round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static F power_of_two(F n) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
    }
    static F times_power_of_two(F x, F n) { return _mm512_scalef_ps(x, n); }
    static F zero_below(F x, F limit, F y) {
        return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), _mm512_setzero_ps());
    }
    static F keep_lanes(F x, F other, int lo, int hi) {
        const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __mmask16 keep = _mm512_cmp_epi32_mask(lane, _mm512_set1_epi32(lo), _MM_CMPINT_NLT) &
                               _mm512_cmp_epi32_mask(lane, _mm512_set1_epi32(hi), _MM_CMPINT_LT);
        return _mm512_mask_mov_ps(other, keep, x);
    }

    static F from_i8(const int8_t* p) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
    }
    static F from_f16(const uint16_t* p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static F from_bf16(const uint16_t* p) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
    static F set_f16(uint16_t x) { return _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<int16_t>(x))); }
    // As a half that is 2^-8 times the number: exponent and mantissa move to their places there, subnormals included.
    static F from_f8(const uint8_t* p) {
        const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
        const __m256i most = _mm256_set1_epi16(0x3f80);  // NaN
        const __mmask16 nan = _mm256_cmpeq_epi16_mask(_mm256_and_si256(half, most), most);
        return mul(_mm512_cvtph_ps(_mm256_mask_mov_epi16(half, nan, _mm256_set1_epi16(0x7e00))), set(256.0f));
    }
    static void from_nibbles(const uint8_t* p, F* low, F* high) {
        const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        *low = _mm512_cvtepi32_ps(_mm512_and_si512(wide, _mm512_set1_epi32(15)));
        *high = _mm512_cvtepi32_ps(_mm512_srli_epi32(wide, 4));
    }
    static void to_f16(uint16_t* p, F x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }

    // A 16-entry table of floats fits one register, and the permutation looks at the low four bits of its index only.
    using I = __m512i;
    static I load_words(const uint32_t* p) { return _mm512_loadu_si512(p); }
    using Nibbles = I;
    static constexpr float kNibbleUnit = 1.0f, kByteUnit = 1.0f / 16777216.0f;
    static Nibbles load_nibbles(const uint32_t* p) { return load_words(p); }
    template <int N>
    static F nibble(const Nibbles& v) {
        const F codes = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
        return _mm512_permutexvar_ps(N == 0 ? v : _mm512_srli_epi32(v, N < 4 ? 8 * N : 8 * (N - 4) + 4), codes);
    }
    // The byte goes to the top of its word, which then converts to code · 2^24.
    template <int N>
    static F byte(const I& v) {
        const I top = _mm512_set4_epi32(0x0cffffff + (N << 24), 0x08ffffff + (N << 24), 0x04ffffff + (N << 24), 0x00ffffff + (N << 24));
        return _mm512_cvtepi32_ps(_mm512_shuffle_epi8(v, top));
    }

    static I int_set(int32_t x) { return _mm512_set1_epi32(x); }
    static I int_add(I a, I b) { return _mm512_add_epi32(a, b); }
    static I int_sub(I a, I b) { return _mm512_sub_epi32(a, b); }
    static I int_mul(I a, I b) { return _mm512_mullo_epi32(a, b); }
    static I int_from_i8(const int8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
    static I to_int(F x) { return _mm512_cvtps_epi32(x); }
    static int32_t int_sum(I x) { return _mm512_reduce_add_epi32(x); }
    static void store_bytes(int8_t* p, I x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x)); }
    static void store_shorts(int16_t* p, I x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x)); }
    static F to_float(I x) { return _mm512_cvtepi32_ps(x); }
    static I broadcast(const int8_t* x) {
        int32_t word;
        std::memcpy(&word, x, 4);
        return _mm512_set1_epi32(word);
    }
    static I bits_of(I a, I b) { return _mm512_and_si512(a, b); }
    static I flipped(I a, I b) { return _mm512_xor_si512(a, b); }
    static I down4(I a) { return _mm512_srli_epi16(a, 4); }
    static I add16(I a, I b) { return _mm512_add_epi16(a, b); }
    static I pairs(I codes, I x) { return _mm512_maddubs_epi16(codes, x); }
    static I widened(I sums, int16_t factor) { return _mm512_madd_epi16(sums, _mm512_set1_epi16(factor)); }
#if defined(__AVX512VNNI__)
    static I dot_bytes(I sum, I codes, I x) { return _mm512_dpbusd_epi32(sum, codes, x); }
    static I dot_words(I sum, I a, I b) { return _mm512_dpwssd_epi32(sum, a, b); }
#else
    static I dot_words(I sum, I a, I b) { return int_add(sum, _mm512_madd_epi16(a, b)); }
#endif
    static I dot_pairs(I sum, const int16_t* k, const int16_t* q) {
        return dot_words(sum, _mm512_loadu_si512(k), broadcast(reinterpret_cast<const int8_t*>(q)));
    }

#include "simd_x86_dots.inl"

    // See simd_portable.h. Four 16-byte columns side by side, in the lanes of a register.
    static constexpr int kByteColumns = 64;
    static void transpose_bytes(const int8_t* const* rows, int column, int lanes, int8_t* out) {
        if (lanes < 4) return transpose_narrow(rows, column, lanes, out);
        __m512i a[16], b[16];
        for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i] + column);
        for (int stage = 0; stage < 2; ++stage) {
            for (int i = 0; i < 8; ++i) {
                b[2 * i] = _mm512_unpacklo_epi8(a[i], a[i + 8]);
                b[2 * i + 1] = _mm512_unpackhi_epi8(a[i], a[i + 8]);
            }
            for (int i = 0; i < 8; ++i) {
                a[2 * i] = _mm512_unpacklo_epi8(b[i], b[i + 8]);
                a[2 * i + 1] = _mm512_unpackhi_epi8(b[i], b[i + 8]);
            }
        }
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + i * 64, a[i]);
    }

#include "simd_x86.inl"
};

}  // namespace
