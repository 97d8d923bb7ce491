// Vector primitives, AVX-512 (F, BW, DQ, VL): 16 floats. See simd_portable.h for what each one means.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

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
    static void to_i8(int8_t* p, F x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
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
    static I dot_pairs(I sum, const int16_t* k, const int16_t* q) {
        const I pairs = _mm512_loadu_si512(k), both = broadcast(reinterpret_cast<const int8_t*>(q));
#if defined(__AVX512VNNI__)
        return _mm512_dpwssd_epi32(sum, pairs, both);
#else
        return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, both));
#endif
    }
    static F to_float(I x) { return _mm512_cvtepi32_ps(x); }
    static I broadcast(const int8_t* x) {
        int32_t word;
        std::memcpy(&word, x, 4);
        return _mm512_set1_epi32(word);
    }
    static I low_nibbles(I v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
    static I high_nibbles(I v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }
    struct Halves {
        I low, high;
    };

#if defined(__AVX512VNNI__)
    static constexpr int kBias4 = 8, kBias8 = 128, kFlush4 = 1 << 20, kFlush8 = 1 << 20;
    struct Sum {
        I total;
        void clear() { total = _mm512_setzero_si512(); }
        void flush() {}
        I value() const { return total; }
    };
    using Sum4 = Sum;
    using Sum8 = Sum;
    using Word8 = I;
    static Word8 open8(I v) { return _mm512_xor_si512(v, _mm512_set1_epi8(-128)); }
    static void dot8(Sum8& sum, const Word8& w, const int8_t* x) { sum.total = _mm512_dpbusd_epi32(sum.total, w, broadcast(x)); }
    static void dot4(Sum4& sum, const Halves& w, const int8_t* x) {
        sum.total = _mm512_dpbusd_epi32(sum.total, w.low, broadcast(x));
        sum.total = _mm512_dpbusd_epi32(sum.total, w.high, broadcast(x + 4));
    }
#else
    // As in simd_avx2.h.
    static constexpr int kBias4 = 8, kBias8 = 128, kFlush4 = 4, kFlush8 = 8;
    static I pairs(I codes, I x) { return _mm512_maddubs_epi16(codes, x); }
    static I widened(I sums, int16_t factor) { return _mm512_madd_epi16(sums, _mm512_set1_epi16(factor)); }
    struct Sum4 {
        I total, part;
        void clear() { total = part = _mm512_setzero_si512(); }
        void flush() {
            total = _mm512_add_epi32(total, widened(part, 1));
            part = _mm512_setzero_si512();
        }
        I value() const { return total; }
    };
    struct Sum8 {
        I total, low, high;
        void clear() { total = low = high = _mm512_setzero_si512(); }
        void flush() {
            total = _mm512_add_epi32(total, _mm512_add_epi32(widened(low, 1), widened(high, 16)));
            low = high = _mm512_setzero_si512();
        }
        I value() const { return total; }
    };
    using Word8 = Halves;
    static Word8 open8(I v) {
        v = _mm512_xor_si512(v, _mm512_set1_epi8(-128));
        return {low_nibbles(v), high_nibbles(v)};
    }
    static void dot8(Sum8& sum, const Word8& w, const int8_t* x) {
        const I codes = broadcast(x);
        sum.low = _mm512_add_epi16(sum.low, pairs(w.low, codes));
        sum.high = _mm512_add_epi16(sum.high, pairs(w.high, codes));
    }
    static void dot4(Sum4& sum, const Halves& w, const int8_t* x) {
        sum.part = _mm512_add_epi16(sum.part, pairs(w.low, broadcast(x)));
        sum.part = _mm512_add_epi16(sum.part, pairs(w.high, broadcast(x + 4)));
    }
#endif
    using Word4 = Halves;
    static Word4 open4(I v) { return {low_nibbles(v), high_nibbles(v)}; }

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
