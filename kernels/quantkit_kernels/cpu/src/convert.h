// Scalar conversions between float and narrower floats, round to nearest even, for row tails and the portable unit.
#pragma once
#include <cstdint>
#include <cstring>

static inline uint32_t bits_of(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return u;
}

static inline float float_of(uint32_t u) {
    float x;
    std::memcpy(&x, &u, 4);
    return x;
}

static inline float bf16_to_float(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }

static inline uint16_t float_to_bf16(float x) {
    const uint32_t u = bits_of(x);
    if ((u & 0x7fffffff) > 0x7f800000) return 0x7fc0;  // as torch casts NaN
    return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static inline float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
    const uint32_t magnitude = static_cast<uint32_t>(h & 0x7fff) << 13;
    const uint32_t exponent = h & 0x7c00;
    if (exponent == 0x7c00) return float_of(sign | 0x7f800000 | magnitude);
    if (exponent) return float_of(sign | (magnitude + (112u << 23)));
    // Subnormal: 0.5·2^-14 as the magic base, exact in float.
    return float_of(sign | bits_of(float_of(magnitude + (113u << 23)) - float_of(113u << 23)));
}

static inline uint16_t float_to_half(float x) {
    const uint32_t u = bits_of(x);
    const uint16_t sign = static_cast<uint16_t>(u >> 16 & 0x8000);
    const uint32_t magnitude = u & 0x7fffffff;
    if (magnitude > 0x7f800000) return sign | 0x7e00;
    if (magnitude >= 0x477ff000) return sign | 0x7c00;  // rounds past 65504
    if (magnitude < 0x38800000) {                       // below 2^-14: let the FPU round at 2^-24
        const float rounded = float_of(magnitude) + 0.5f;
        return sign | static_cast<uint16_t>(bits_of(rounded) - bits_of(0.5f));
    }
    return sign | static_cast<uint16_t>((magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

// e4m3 (OCP 8-bit floating point): magnitudes beyond 448 saturate, NaN is 0x7f. Without branches, so that loops of it
// become vectors.
static inline uint8_t float_to_f8(float x) {
    const uint32_t u = bits_of(x), magnitude = u & 0x7fffffff;
    const uint32_t normal = (magnitude - (120u << 23) + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
    const uint32_t subnormal = bits_of(float_of(magnitude) + 16384.0f) - bits_of(16384.0f);  // whose last bit is 2^-9
    const uint32_t finite = magnitude < 0x3c800000 ? subnormal : magnitude > 0x43e00000 ? 0x7e : normal;
    return static_cast<uint8_t>(magnitude > 0x7f800000 ? 0x7f : finite | (u >> 24 & 0x80));
}

static inline float f8_to_float(uint8_t code) {
    const uint32_t sign = static_cast<uint32_t>(code & 0x80) << 24, magnitude = code & 0x7f;
    if (magnitude == 0x7f) return float_of(sign | 0x7fc00000);
    if (magnitude < 8) return float_of(sign | bits_of(static_cast<float>(magnitude) / 512.0f));  // subnormal
    return float_of(sign | ((magnitude << 20) + (120u << 23)));
}

// The greatest half that is at most x, and the least that is at least x >= 0; |x| <= 65504.
static inline uint16_t half_below(float x) {
    const uint16_t near = float_to_half(x);
    return static_cast<uint16_t>(half_to_float(near) <= x ? near : near & 0x8000 ? near + 1 : near - 1);
}
static inline uint16_t half_above(float x) {
    const uint16_t near = float_to_half(x);
    return static_cast<uint16_t>(half_to_float(near) < x ? near + 1 : near);
}
