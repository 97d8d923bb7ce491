// Members of Simd shared by the x86 units; included inside the struct.

// 16 × 16 bytes at column c: four rounds of interleaving rows i and i + 8 rotate the index bits into place.
static void transpose_bytes_16(const int8_t* const* rows, int c, int8_t* out) {
    __m128i a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + c));
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
    for (int i = 0; i < 16; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i * 16), a[i]);
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
