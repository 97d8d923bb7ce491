// Members of Simd shared by the x86 units: integer dot products, on the struct's own I. The struct gives `pairs`
// (u8 · s8, two products in 16 bits), `widened` (pairs of 16 bits times a factor, in 32), `add16`, and where there is
// VNNI `dot_bytes`, which puts four products and their sum straight into 32 bits. Included inside the struct.

static I low_nibbles(I v) { return bits_of(v, int_set(0x0f0f0f0f)); }
static I high_nibbles(I v) { return low_nibbles(down4(v)); }
static I raised(I v) { return flipped(v, int_set(static_cast<int32_t>(0x80808080u))); }  // signed bytes as 0..255
static constexpr int kBias4 = 8, kBias8 = 128;
template <int H>
static I open4(I v) {
    return H ? high_nibbles(v) : low_nibbles(v);
}

#if defined(__AVXVNNI__) || defined(__AVX512VNNI__)
static constexpr int kFlush4 = 1 << 20, kFlush8 = 1 << 20;
struct Sum4 {
    I total;
    void clear() { total = int_set(0); }
    void flush() {}
    I value() const { return total; }
};
using Sum8 = Sum4;
static I open8(I v) { return raised(v); }
template <bool>
static void dot4(Sum4& sum, const I& w, const int8_t* x) {
    sum.total = dot_bytes(sum.total, w, broadcast(x));
}
template <bool>
static void dot8(Sum8& sum, const I& w, const int8_t* x) {
    sum.total = dot_bytes(sum.total, w, broadcast(x));
}
#else
// Pairs of products of 4-bit codes are at most 2·15·127 = 3,810, so that eight of them fit 16 bits before they are
// widened. 8-bit codes, raised to 0..255, would not fit and are taken as two halves of 4 bits.
static constexpr int kFlush4 = 4, kFlush8 = 8;
// Compilers would gather the products of an unrolled loop in memory and add them at its end: this one is added here.
template <bool kFirst>
static void add_pairs(I& part, I codes, I x) {
    part = kFirst ? pairs(codes, x) : add16(part, pairs(codes, x));
    __asm__("" : "+v"(part));
}
struct Sum4 {
    I total, part;
    void clear() { total = int_set(0); }
    void flush() { total = int_add(total, widened(part, 1)); }
    I value() const { return total; }
};
struct Sum8 {
    I total, low, high;
    void clear() { total = int_set(0); }
    void flush() { total = int_add(total, int_add(widened(low, 1), widened(high, 16))); }
    I value() const { return total; }
};
struct Halves {
    I low, high;
};
static Halves open8(I v) { return {low_nibbles(raised(v)), high_nibbles(raised(v))}; }
template <bool kFirst>
static void dot4(Sum4& sum, const I& w, const int8_t* x) {
    add_pairs<kFirst>(sum.part, w, broadcast(x));
}
template <bool kFirst>
static void dot8(Sum8& sum, const Halves& w, const int8_t* x) {
    const I codes = broadcast(x);
    add_pairs<kFirst>(sum.low, w.low, codes);
    add_pairs<kFirst>(sum.high, w.high, codes);
}
#endif
