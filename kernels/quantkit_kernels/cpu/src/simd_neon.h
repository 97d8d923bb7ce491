// Vector primitives, Advanced SIMD of 64-bit Arm: 4 floats. See simd_portable.h for what each one means.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace {

struct Simd {
    static constexpr int W = 4;
    static constexpr int kRegisters = 32;
    using F = float32x4_t;
    using I = int32x4_t;

    static F zero() { return vdupq_n_f32(0); }
    static F set(float x) { return vdupq_n_f32(x); }
    static F load(const float* p) { return vld1q_f32(p); }
    static void store(float* p, F x) { vst1q_f32(p, x); }
    static F load_n(const float* p, int n) {
        float lanes[W] = {};
        std::memcpy(lanes, p, sizeof(float) * static_cast<size_t>(n < W ? n : W));
        return load(lanes);
    }
    static void store_n(float* p, F x, int n) {
        float lanes[W];
        store(lanes, x);
        std::memcpy(p, lanes, sizeof(float) * static_cast<size_t>(n < W ? n : W));
    }

    static F add(F a, F b) { return vaddq_f32(a, b); }
    static F sub(F a, F b) { return vsubq_f32(a, b); }
    static F mul(F a, F b) { return vmulq_f32(a, b); }
    static F div(F a, F b) { return vdivq_f32(a, b); }
    static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
    // Not vminq and vmaxq, which return NaN from either side.
    static F min(F a, F b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
    static F max(F a, F b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
    static float sum(F x) {
        const float32x2_t s = vadd_f32(vget_low_f32(x), vget_high_f32(x));
        return vget_lane_f32(s, 0) + vget_lane_f32(s, 1);
    }
    static float highest(F x) {
        const float32x2_t low = vget_low_f32(x), high = vget_high_f32(x), s = vbsl_f32(vcgt_f32(low, high), low, high);
        const float a = vget_lane_f32(s, 0), b = vget_lane_f32(s, 1);
        return a > b ? a : b;
    }

    static F round(F x) { return vrndnq_f32(x); }
    static F power_of_two(F n) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(to_int(n), vdupq_n_s32(127)), 23)); }
    static F times_power_of_two(F x, F n) {
        return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), vshlq_n_s32(to_int(n), 23)));
    }
    static F zero_below(F x, F limit, F y) {
        return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y), vcltq_f32(x, limit)));
    }
    static F keep_lanes(F x, F other, int lo, int hi) {
        const int32_t order[W] = {0, 1, 2, 3};
        const I lane = vld1q_s32(order);
        return vbslq_f32(vandq_u32(vcgeq_s32(lane, int_set(lo)), vcltq_s32(lane, int_set(hi))), x, other);
    }

    // Four bytes, and not the four behind them, which may not be there.
    static int16x4_t shorts(const int8_t* p) {
        uint32_t word;
        std::memcpy(&word, p, sizeof word);
        return vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(word))));
    }
    static F from_i8(const int8_t* p) { return vcvtq_f32_s32(int_from_i8(p)); }
    static F from_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
    static F from_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
    static F set_f16(uint16_t x) { return vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(x))); }
    // As a half that is 2^-8 times the number: exponent and mantissa move to their places there, subnormals included.
    static F from_f8(const uint8_t* p) {
        const uint16x4_t wide = vreinterpret_u16_s16(shorts(reinterpret_cast<const int8_t*>(p)));
        const uint16x4_t half = vand_u16(vshl_n_u16(wide, 7), vdup_n_u16(0xbf80)), most = vdup_n_u16(0x3f80);
        const uint16x4_t nan = vand_u16(vceq_u16(vand_u16(half, most), most), vdup_n_u16(0x7c00));
        return vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(vorr_u16(half, nan))), 256.0f);
    }
    static void from_nibbles(const uint8_t* p, F* low, F* high) {
        const uint32x4_t wide = vreinterpretq_u32_s32(vandq_s32(int_from_i8(reinterpret_cast<const int8_t*>(p)), int_set(255)));
        *low = vcvtq_f32_u32(vandq_u32(wide, vdupq_n_u32(15)));
        *high = vcvtq_f32_u32(vshrq_n_u32(wide, 4));
    }
    static void to_f16(uint16_t* p, F x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }

    // Codes become signed bytes by a table; the byte wanted then moves to the top of its word, which converts to
    // code · 2^24.
    static uint32x4_t load_words(const uint32_t* p) { return vld1q_u32(p); }
    struct Nibbles {
        uint32x4_t low, high;
    };
    static constexpr float kNibbleUnit = 1.0f / 16777216.0f, kByteUnit = kNibbleUnit;
    static Nibbles load_nibbles(const uint32_t* p) {
        const int8_t held[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
        const int8x16_t codes = vld1q_s8(held);
        const uint8x16_t v = vreinterpretq_u8_u32(load_words(p));
        return {vreinterpretq_u32_s8(vqtbl1q_s8(codes, vandq_u8(v, vdupq_n_u8(15)))),
                vreinterpretq_u32_s8(vqtbl1q_s8(codes, vshrq_n_u8(v, 4)))};
    }
    template <int N>
    static F nibble(const Nibbles& v) {
        return byte<N % 4>(N < 4 ? v.low : v.high);
    }
    template <int N>
    static F byte(const uint32x4_t& v) {
        const uint32x4_t top = vandq_u32(vshlq_n_u32(v, 24 - 8 * N), vdupq_n_u32(0xff000000u));
        return vcvtq_f32_s32(vreinterpretq_s32_u32(top));
    }

    static constexpr int kBias4 = 8, kBias8 = 0;
    static int32_t start_of(const int8_t*) { return 0; }
    static I int_set(int32_t x) { return vdupq_n_s32(x); }
    static I int_add(I a, I b) { return vaddq_s32(a, b); }
    static I int_sub(I a, I b) { return vsubq_s32(a, b); }
    static I int_mul(I a, I b) { return vmulq_s32(a, b); }
    static I int_from_i8(const int8_t* p) { return vmovl_s16(shorts(p)); }
    static I to_int(F x) { return vcvtnq_s32_f32(x); }
    static int32_t int_sum(I x) { return vaddvq_s32(x); }
    static void store_shorts(int16_t* p, I x) { vst1_s16(p, vqmovn_s32(x)); }
    static void store_bytes(int8_t* p, I x) {
        const int16x4_t narrow = vqmovn_s32(x);
        const uint32_t word = vget_lane_u32(vreinterpret_u32_s8(vqmovn_s16(vcombine_s16(narrow, narrow))), 0);
        std::memcpy(p, &word, sizeof word);
    }
    static F to_float(I x) { return vcvtq_f32_s32(x); }
    static I dot_pairs(I sum, const int16_t* k, const int16_t* q) {
        const int16x4x2_t pair = vld2_s16(k);
        return vmlal_n_s16(vmlal_n_s16(sum, pair.val[0], q[0]), pair.val[1], q[1]);
    }
    static void pair_bytes(const int8_t* even, const int8_t* odd, int16_t* out) {
        const int8x16_t a = vld1q_s8(even), b = vld1q_s8(odd);
        vst2q_s16(out, (int16x8x2_t{{vmovl_s8(vget_low_s8(a)), vmovl_s8(vget_low_s8(b))}}));
        vst2q_s16(out + 16, (int16x8x2_t{{vmovl_high_s8(a), vmovl_high_s8(b)}}));
    }

    // Four products of bytes and their sum in each lane.
    static I dot_bytes(I sum, int8x16_t codes, int8x16_t x) {
#if defined(__ARM_FEATURE_DOTPROD)
        return vdotq_s32(sum, codes, x);
#else
        // A pair of products is at most 2 · 128 · 127 and fits 16 bits.
        const int16x8_t low = vmull_s8(vget_low_s8(codes), vget_low_s8(x)), high = vmull_high_s8(codes, x);
        return vpadalq_s16(sum, vpaddq_s16(low, high));
#endif
    }
    static int8x16_t broadcast(const int8_t* x) {
        int32_t word;
        std::memcpy(&word, x, sizeof word);
        return vreinterpretq_s8_s32(vdupq_n_s32(word));
    }
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
    static int8x16_t open4(uint32x4_t v) {
        const uint8x16_t bytes = vreinterpretq_u8_u32(v);
        return vreinterpretq_s8_u8(H ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15)));
    }
    static int8x16_t open8(uint32x4_t v) { return vreinterpretq_s8_u32(v); }
    static void dot4(Sum4& sum, const int8x16_t& w, const int8_t* x) {
        sum.total = dot_bytes(sum.total, w, broadcast(x));
    }
    static void dot8(Sum8& sum, const int8x16_t& w, const int8_t* x) {
        sum.total = dot_bytes(sum.total, w, broadcast(x));
    }

    // Four rounds of interleaving rows i and i + 8, as simd_x86.inl has them.
    static constexpr int kByteColumns = 16;
    static void transpose_bytes(const int8_t* const* rows, int column, int lanes, int8_t* out) {
        for (int lane = 0; lane < lanes; ++lane) {
            int8x16_t a[16], b[16];
            for (int i = 0; i < 16; ++i) a[i] = vld1q_s8(rows[i] + column + lane * 16);
            for (int stage = 0; stage < 2; ++stage) {
                for (int i = 0; i < 8; ++i) {
                    b[2 * i] = vzip1q_s8(a[i], a[i + 8]);
                    b[2 * i + 1] = vzip2q_s8(a[i], a[i + 8]);
                }
                for (int i = 0; i < 8; ++i) {
                    a[2 * i] = vzip1q_s8(b[i], b[i + 8]);
                    a[2 * i + 1] = vzip2q_s8(b[i], b[i + 8]);
                }
            }
            for (int i = 0; i < 16; ++i) vst1q_s8(out + (i * lanes + lane) * 16, a[i]);
        }
    }
    static void transpose_4x4(const float* in, int64_t ld_in, float* out, int64_t ld_out) {
        const F a = load(in), b = load(in + ld_in), c = load(in + 2 * ld_in), d = load(in + 3 * ld_in);
        const float32x4x2_t ab = vtrnq_f32(a, b), cd = vtrnq_f32(c, d);
        store(out, vcombine_f32(vget_low_f32(ab.val[0]), vget_low_f32(cd.val[0])));
        store(out + ld_out, vcombine_f32(vget_low_f32(ab.val[1]), vget_low_f32(cd.val[1])));
        store(out + 2 * ld_out, vcombine_f32(vget_high_f32(ab.val[0]), vget_high_f32(cd.val[0])));
        store(out + 3 * ld_out, vcombine_f32(vget_high_f32(ab.val[1]), vget_high_f32(cd.val[1])));
    }
};

}  // namespace
