// Shared by the products with floats and with codes.

namespace {

constexpr int kVectors = kPanel / W;  // vectors of a panel
constexpr bool kWide = Simd::kRegisters == 32;
using Words = decltype(Simd::load_words(nullptr));

// Up to so many rows weights are dequantized in registers; each number of rows takes as many vectors of outputs
// together as hide the latency of an FMA and fit the register file.
constexpr int kGemvRows = kWide ? 8 : 6;
constexpr int kGemvPanels = 8 / kVectors ? 8 / kVectors : 1;

// Scales of one group of one panel, vector c.
QK_INLINE F scale_at(const LinearArgs& a, int64_t index, float unit) {
    F s;
    if (a.scale_dtype == kF16) s = Simd::from_f16(static_cast<const uint16_t*>(a.scale) + index);
    else if (a.scale_dtype == kBF16) s = Simd::from_bf16(static_cast<const uint16_t*>(a.scale) + index);
    else s = Simd::load(static_cast<const float*>(a.scale) + index);
    return unit == 1.0f ? s : Simd::mul(s, Simd::set(unit));
}

// What the codes' bias and zero points have added to a sum of products.
QK_INLINE Simd::I excess(const LinearArgs& a, int bias, int64_t parameter, int32_t sum) {
    if (!a.zero) return Simd::int_set(bias * sum);
    return Simd::int_mul(Simd::int_add(Simd::int_from_i8(a.zero + parameter), Simd::int_set(bias)), Simd::int_set(sum));
}

QK_INLINE void write_out(const LinearArgs& a, int64_t row, int column, F y) {
    const int left = a.n - column;
    if (left <= 0) return;
    if (a.bias) y = Simd::add(y, left >= W ? Simd::load(a.bias + column) : Simd::load_n(a.bias + column, left));
    if (a.softcap > 0) y = soft_capped(y, a.softcap);
    float* out = a.out + row * a.n + column;
    if (left >= W) Simd::store(out, y);
    else Simd::store_n(out, y, left);
}

}  // namespace
