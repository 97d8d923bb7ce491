// Members of Simd shared by the x86 units: integer dot products, on the struct's own I. The struct gives `pairs`
// (u8 · s8, two products in 16 bits), `widened` (pairs of 16 bits times a factor, in 32), `add16`, and where there is
// VNNI `dot_bytes`, which puts four products and their sum straight into 32 bits. Included inside the struct.

static I low_nibbles(I v) { return bits_of(v, int_set(0x0f0f0f0f)); }
static I high_nibbles(I v) { return low_nibbles(down4(v)); }
static I raised(I v) { return flipped(v, int_set(static_cast<int32_t>(0x80808080u))); }  // signed bytes as 0..255
template <int H>
static I open4(I v) {
    return H ? high_nibbles(v) : low_nibbles(v);
}

#if defined(__AVXVNNI__) || defined(__AVX512VNNI__)
static constexpr int kBias4 = 8, kBias8 = 128;
static int32_t start_of(const int8_t*) { return 0; }
struct Sum4 {
    I total;
    void open(int32_t less) { total = int_set(less); }
    void start(int32_t) {}
    void flush() {}
    void add(I more) { total = int_add(total, more); }
    I value() const { return total; }
};
using Sum8 = Sum4;
static I open8(I v) { return raised(v); }
static void dot4(Sum4& sum, const I& w, const int8_t* x) {
    sum.total = dot_bytes(sum.total, w, broadcast(x));
}
static void dot8(Sum8& sum, const I& w, const int8_t* x) {
    sum.total = dot_bytes(sum.total, w, broadcast(x));
}
#else
// Products are summed in 16 bits. Codes of 4 bits less eight, times rows of at most 127, sum up to 16 · 2 · 8 · 127 = 32,512
// over a step: they fit, though the codes as they lie, which are not lessened, may wrap on the way. A step's sums therefore
// start from minus eight times the row's. 8-bit codes are taken as two halves of 4 bits.
static constexpr int kBias4 = 0, kBias8 = -8;
static_assert(kStep == 64, "a step's sums fit 16 bits");
// What the lanes of a step's 64 channels start from: two times 16 bits.
static int32_t start_of(const int8_t* x) {
    const __m128i eight = _mm_set1_epi8(8);
    __m128i s = _mm_setzero_si128();
    for (int i = 0; i < kStep; i += 16) {
        s = _mm_sub_epi16(s, _mm_maddubs_epi16(eight, _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
    }
    s = _mm_add_epi16(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi16(s, _mm_shuffle_epi32(s, 0xb1)));
}
// Compilers would gather the products of an unrolled loop in memory and add them at its end: this one is added here.
static void add_pairs(I& part, I codes, I x) {
    __asm__("vpaddw %1, %0, %0" : "+v"(part) : "v"(pairs(codes, x)));
}
struct Sum4 {
    I total, part;
    void open(int32_t) { total = int_set(0); }
    void start(int32_t from) { part = int_set(from); }
    void flush() { total = int_add(total, widened(part, 1)); }
    void add(I more) { total = int_add(total, more); }
    I value() const { return total; }
};
struct Sum8 {
    I total, low, high;
    void open(int32_t less) { total = int_set(less); }
    void start(int32_t from) { low = high = int_set(from); }
    void flush() { total = int_add(total, int_add(widened(low, 1), widened(high, 16))); }
    void add(I more) { total = int_add(total, more); }
    I value() const { return total; }
};
struct Halves {
    I low, high;
};
static Halves open8(I v) { return {low_nibbles(raised(v)), high_nibbles(raised(v))}; }
static void dot4(Sum4& sum, const I& w, const int8_t* x) { add_pairs(sum.part, w, broadcast(x)); }
static void dot8(Sum8& sum, const Halves& w, const int8_t* x) {
    const I codes = broadcast(x);
    add_pairs(sum.low, w.low, codes);
    add_pairs(sum.high, w.high, codes);
}
#endif
