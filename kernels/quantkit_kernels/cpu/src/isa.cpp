// cpuid says what the silicon has; XGETBV says which registers the operating system saves. Both must agree.
#include "isa.h"

#if QK_X86
#include <cpuid.h>
#endif

int32_t isa_mask() {
    int32_t mask = kIsaPortable;
#if QK_X86
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return mask;
    const bool osxsave = c >> 27 & 1, avx = c >> 28 & 1, fma = c >> 12 & 1, f16c = c >> 29 & 1;
    if (!osxsave || !avx || !fma || !f16c) return mask;
    unsigned xcr0, xcr0_high;
    __asm__ volatile("xgetbv" : "=a"(xcr0), "=d"(xcr0_high) : "c"(0));
    if ((xcr0 & 0x6) != 0x6) return mask;  // XMM and YMM state
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return mask;
    if (b >> 5 & 1) mask |= kIsaAvx2;
    const bool f = b >> 16 & 1, dq = b >> 17 & 1, bw = b >> 30 & 1, vl = b >> 31 & 1;
    if ((mask & kIsaAvx2) && f && dq && bw && vl && (xcr0 & 0xe0) == 0xe0) mask |= kIsaAvx512;  // opmask and ZMM state
#endif
    return mask;
}
