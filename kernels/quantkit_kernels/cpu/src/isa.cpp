// x86: cpuid says what the silicon has, XGETBV which registers the operating system saves, and both must agree.
// Arm: Linux tells a process what it may use.
#include "isa.h"

#if QK_X86
#include <cpuid.h>
#endif
#if QK_ARM64 && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#if QK_X86 && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if QK_AMX
// Linux lets a process use tile registers only once it has asked; its threads then may, too.
bool tiles_granted() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}
#endif

int32_t detect() {
    int32_t mask = kIsaPortable;
#if QK_X86
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return mask;
    const bool osxsave = c >> 27 & 1, avx = c >> 28 & 1, fma = c >> 12 & 1, f16c = c >> 29 & 1;
    if (!osxsave || !avx || !fma || !f16c) return mask;
    unsigned xcr0, xcr0_high;
    __asm__ volatile("xgetbv" : "=a"(xcr0), "=d"(xcr0_high) : "c"(0));
    if ((xcr0 & 0x6) != 0x6) return mask;  // XMM and YMM state
    unsigned b7, c7, d7, leaves;
    if (!__get_cpuid_count(7, 0, &leaves, &b7, &c7, &d7)) return mask;
    [[maybe_unused]] unsigned a71 = 0;
    if (leaves >= 1) __get_cpuid_count(7, 1, &a71, &b, &c, &d);
    if (!(b7 >> 5 & 1)) return mask;
    mask |= kIsaAvx2;
#if QK_AVX_VNNI
    if (a71 >> 4 & 1) mask |= kIsaAvxVnni;
#endif
    const bool f = b7 >> 16 & 1, dq = b7 >> 17 & 1, bw = b7 >> 30 & 1, vl = b7 >> 31 & 1;
    if (!f || !dq || !bw || !vl || (xcr0 & 0xe0) != 0xe0) return mask;  // opmask and ZMM state
    mask |= kIsaAvx512;
    if (!(c7 >> 11 & 1)) return mask;
    mask |= kIsaAvx512Vnni;
#if QK_AMX
    const bool tile = d7 >> 24 & 1, tile_int8 = d7 >> 25 & 1;
    constexpr unsigned kTileState = 0x60000;
    if (tile && tile_int8 && (xcr0 & kTileState) == kTileState && tiles_granted()) mask |= kIsaAmx;
#endif
#endif
#if QK_ARM64
    mask |= kIsaNeon;
#if defined(__linux__)
    if (!(getauxval(AT_HWCAP) & HWCAP_ASIMDDP)) return mask;
    mask |= kIsaNeonDotprod;
#if QK_I8MM
    constexpr unsigned long kI8mm = 1 << 13;  // HWCAP2_I8MM, which older headers do not name
    if (getauxval(AT_HWCAP2) & kI8mm) mask |= kIsaNeonI8mm;
#endif
#endif
#endif
    return mask;
}

}  // namespace

int32_t isa_mask() {
    static const int32_t mask = detect();
    return mask;
}
