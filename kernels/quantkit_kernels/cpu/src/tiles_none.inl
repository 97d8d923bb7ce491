// For instruction sets without matrix products.

namespace {

inline bool use_tiles(const LinearArgs&, int) { return false; }
inline void tile_chunk(const LinearArgs&, int64_t, int, int, int, float*) {}
inline int64_t tile_scratch(const LinearArgs&) { return 0; }

}  // namespace
