// Members of Simd shared by the x86 units; included inside the struct.

// Fewer columns than fill a register's lanes. Four rounds of interleaving rows i and i + 8 rotate the index bits of
// 16 × 16 bytes into place, here as in the full-width forms.
static void transpose_narrow(const int8_t* const* rows, int column, int lanes, int8_t* out) {
    for (int lane = 0; lane < lanes; ++lane) {
        __m128i a[16], b[16];
        for (int i = 0; i < 16; ++i) a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + column + lane * 16));
        for (int stage = 0; stage < 2; ++stage) {
            for (int i = 0; i < 8; ++i) {
                b[2 * i] = _mm_unpacklo_epi8(a[i], a[i + 8]);
                b[2 * i + 1] = _mm_unpackhi_epi8(a[i], a[i + 8]);
            }
            for (int i = 0; i < 8; ++i) {
                a[2 * i] = _mm_unpacklo_epi8(b[i], b[i + 8]);
                a[2 * i + 1] = _mm_unpackhi_epi8(b[i], b[i + 8]);
            }
        }
        for (int i = 0; i < 16; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(out + (i * lanes + lane) * 16), a[i]);
    }
}

static void pair_bytes(const int8_t* even, const int8_t* odd, int16_t* out) {
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(even));
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(odd));
    const __m256i low = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b)), high = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out) + 1, high);
}

// 4 × 4 floats: out[c * ld_out + r] = in[r * ld_in + c].
static void transpose_4x4(const float* in, int64_t ld_in, float* out, int64_t ld_out) {
    __m128 a = _mm_loadu_ps(in), b = _mm_loadu_ps(in + ld_in), c = _mm_loadu_ps(in + 2 * ld_in),
           d = _mm_loadu_ps(in + 3 * ld_in);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(out, a);
    _mm_storeu_ps(out + ld_out, b);
    _mm_storeu_ps(out + 2 * ld_out, c);
    _mm_storeu_ps(out + 3 * ld_out, d);
}
