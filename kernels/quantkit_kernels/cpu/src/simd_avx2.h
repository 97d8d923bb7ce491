// Vector primitives, AVX2 with FMA and F16C: 8 floats. See simd_portable.h for what each one means.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "args.h"

namespace {

struct Simd {
    static constexpr int W = 8;
    static constexpr int kRegisters = 16;
    using F = __m256;

    static F zero() { return _mm256_setzero_ps(); }
    static F set(float x) { return _mm256_set1_ps(x); }
    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
    static __m256i lanes() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
    static __m256i first(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes()); }
    static F load_n(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
    static void store_n(float* p, F x, int n) { _mm256_maskstore_ps(p, first(n), x); }

    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F div(F a, F b) { return _mm256_div_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F min(F a, F b) { return _mm256_min_ps(a, b); }
    static F max(F a, F b) { return _mm256_max_ps(a, b); }
    static float sum(F x) {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
    }
    static float highest(F x) {
        __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        s = _mm_max_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
    }

    static F round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static F power_of_two(F n) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
    }
    static F times_power_of_two(F x, F n) {
        return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
    }
    static F zero_below(F x, F limit, F y) { return _mm256_andnot_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ), y); }
    static F keep_lanes(F x, F other, int lo, int hi) {
        const __m256i keep = _mm256_and_si256(_mm256_cmpgt_epi32(lanes(), _mm256_set1_epi32(lo - 1)), first(hi));
        return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(keep));
    }

    static F from_i8(const int8_t* p) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
    }
    static F from_f16(const uint16_t* p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static F from_bf16(const uint16_t* p) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }
    static F set_f16(uint16_t x) { return _mm256_cvtph_ps(_mm_set1_epi16(static_cast<int16_t>(x))); }
    // As a half that is 2^-8 times the number: exponent and mantissa move to their places there, subnormals included.
    static F from_f8(const uint8_t* p) {
        const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
        const __m128i half = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<int16_t>(0xbf80)));
        const __m128i most = _mm_set1_epi16(0x3f80);  // NaN
        const __m128i nan = _mm_and_si128(_mm_cmpeq_epi16(_mm_and_si128(half, most), most), _mm_set1_epi16(0x7c00));
        return mul(_mm256_cvtph_ps(_mm_or_si128(half, nan)), set(256.0f));
    }
    static void from_nibbles(const uint8_t* p, F* low, F* high) {
        const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
        *low = _mm256_cvtepi32_ps(_mm256_and_si256(wide, _mm256_set1_epi32(15)));
        *high = _mm256_cvtepi32_ps(_mm256_srli_epi32(wide, 4));
    }
    static void to_f16(uint16_t* p, F x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }

    // Codes become signed bytes by a table; a byte shuffle then puts one into the top byte of each word, which converts
    // to code · 2^24 without a shift or a mask of its own.
    using I = __m256i;
    static I load_words(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    struct Nibbles {
        __m256i low, high;
    };
    static constexpr float kNibbleUnit = 1.0f / 16777216.0f, kByteUnit = kNibbleUnit;
    static Nibbles load_nibbles(const uint32_t* p) {
        const __m256i codes = _mm256_setr_epi8(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7,  //
                                               -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
        const __m256i v = load_words(p);
        return {_mm256_shuffle_epi8(codes, low_nibbles(v)), _mm256_shuffle_epi8(codes, high_nibbles(v))};
    }
    template <int N>
    static F nibble(const Nibbles& v) {
        return byte<N % 4>(N < 4 ? v.low : v.high);
    }
    template <int N>
    static F byte(const I& v) {
        constexpr char b = N;
        const __m256i top = _mm256_setr_epi8(-1, -1, -1, b, -1, -1, -1, b + 4, -1, -1, -1, b + 8, -1, -1, -1, b + 12,  //
                                             -1, -1, -1, b, -1, -1, -1, b + 4, -1, -1, -1, b + 8, -1, -1, -1, b + 12);
        return _mm256_cvtepi32_ps(_mm256_shuffle_epi8(v, top));
    }

    static I int_set(int32_t x) { return _mm256_set1_epi32(x); }
    static I int_add(I a, I b) { return _mm256_add_epi32(a, b); }
    static I int_sub(I a, I b) { return _mm256_sub_epi32(a, b); }
    static I int_mul(I a, I b) { return _mm256_mullo_epi32(a, b); }
    static I int_from_i8(const int8_t* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
    static I to_int(F x) { return _mm256_cvtps_epi32(x); }
    static int32_t int_sum(I x) {
        __m128i s = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
        return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
    }
    static void store_bytes(int8_t* p, I x) {
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
    }
    static void store_shorts(int16_t* p, I x) {
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(x, x), 0x08);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
    }
    static F to_float(I x) { return _mm256_cvtepi32_ps(x); }
    static I broadcast(const int8_t* x) {
        int32_t word;
        std::memcpy(&word, x, 4);
        return _mm256_set1_epi32(word);
    }

    static I bits_of(I a, I b) { return _mm256_and_si256(a, b); }
    static I flipped(I a, I b) { return _mm256_xor_si256(a, b); }
    static I down4(I a) { return _mm256_srli_epi16(a, 4); }
    static I add16(I a, I b) { return _mm256_add_epi16(a, b); }
    static I pairs(I codes, I x) { return _mm256_maddubs_epi16(codes, x); }
    static I widened(I sums, int16_t factor) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(factor)); }
#if defined(__AVXVNNI__)
    static I dot_bytes(I sum, I codes, I x) { return _mm256_dpbusd_avx_epi32(sum, codes, x); }
    static I dot_words(I sum, I a, I b) { return _mm256_dpwssd_avx_epi32(sum, a, b); }
#else
    static I dot_words(I sum, I a, I b) {
        sum = int_add(sum, _mm256_madd_epi16(a, b));
        __asm__("" : "+x"(sum));  // added here, as add_pairs has it
        return sum;
    }
#endif
    static I dot_pairs(I sum, const int16_t* k, const int16_t* q) {
        return dot_words(sum, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(k)), broadcast(reinterpret_cast<const int8_t*>(q)));
    }

#include "simd_x86_dots.inl"

    // See simd_portable.h. Two 16-byte columns side by side, in the lanes of a register.
    static constexpr int kByteColumns = 32;
    static void transpose_bytes(const int8_t* const* rows, int column, int lanes, int8_t* out) {
        if (lanes < 2) return transpose_narrow(rows, column, lanes, out);
        __m256i a[16], b[16];
        for (int i = 0; i < 16; ++i) a[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[i] + column));
        for (int stage = 0; stage < 2; ++stage) {
            for (int i = 0; i < 8; ++i) {
                b[2 * i] = _mm256_unpacklo_epi8(a[i], a[i + 8]);
                b[2 * i + 1] = _mm256_unpackhi_epi8(a[i], a[i + 8]);
            }
            for (int i = 0; i < 8; ++i) {
                a[2 * i] = _mm256_unpacklo_epi8(b[i], b[i + 8]);
                a[2 * i + 1] = _mm256_unpackhi_epi8(b[i], b[i + 8]);
            }
        }
        for (int i = 0; i < 16; ++i) _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i * 32), a[i]);
    }

#include "simd_x86.inl"
};

}  // namespace
