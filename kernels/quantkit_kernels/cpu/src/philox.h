// Philox 4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): random bits as a function of a
// key and a counter.
#pragma once
#include <cstdint>

namespace {

__extension__ using Wide = unsigned __int128;

// A number in [0, 1) that depends on nothing but its arguments: the first word of the block behind counter `position`
// under key `seed`, as numpy's Philox counts.
inline double uniform(uint64_t seed, uint64_t position) {
    uint64_t word[4] = {position + 1, position + 1 == 0, 0, 0}, key[2] = {seed, 0};
    for (int round = 0; round < 10; ++round) {
        const Wide a = Wide{0xD2E7470EE14C6C93u} * word[0], b = Wide{0xCA5A826395121157u} * word[2];
        const uint64_t high_a = static_cast<uint64_t>(a >> 64), high_b = static_cast<uint64_t>(b >> 64);
        const uint64_t next[4] = {high_b ^ word[1] ^ key[0], static_cast<uint64_t>(b), high_a ^ word[3] ^ key[1], static_cast<uint64_t>(a)};
        for (int i = 0; i < 4; ++i) word[i] = next[i];
        key[0] += 0x9E3779B97F4A7C15u;
        key[1] += 0xBB67AE8584CAA73Bu;
    }
    return static_cast<double>(word[0] >> 11) * 0x1p-53;
}

}  // namespace
