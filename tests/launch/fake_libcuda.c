/* Stands for libcuda.so.1: launches nothing, and writes down what it was told to launch, down to the argument bytes. */

#include <stdint.h>
#include <string.h>

typedef int Result;
typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream;
    void *attributes;
    unsigned attribute_count;
} Config; /* CUlaunchConfig */

typedef struct {
    unsigned grid[3], block[3], shared, attribute_count, count;
    uint64_t stream, function;
    unsigned char bytes[64][8];
} Launch;

static unsigned sizes[64], size_count;
static Launch last;

/* How many bytes each argument of the next launch has: the driver knows it from the kernel. */
void fake_expect(const unsigned *given, unsigned count) {
    memcpy(sizes, given, count * sizeof *given);
    size_count = count;
}

/* The last launch, once: what was told before does not stand for one that never came. */
void fake_last(Launch *out) {
    *out = last;
    memset(&last, 0, sizeof last);
}

static void record(const unsigned *grid, const unsigned *block, unsigned shared, void *stream, unsigned attributes,
                   void *function, void **parameters) {
    memset(&last, 0, sizeof last);
    memcpy(last.grid, grid, sizeof last.grid);
    memcpy(last.block, block, sizeof last.block);
    last.shared = shared, last.attribute_count = attributes, last.count = size_count;
    last.stream = (uint64_t)stream, last.function = (uint64_t)function;
    for (unsigned i = 0; i < size_count; i++) memcpy(last.bytes[i], parameters[i], sizes[i]);
}

Result cuLaunchKernelEx(const Config *c, void *function, void **parameters, void **extra) {
    record(c->grid, c->block, c->shared, c->stream, c->attribute_count, function, parameters);
    return 0;
}

Result cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, void *stream, void **parameters, void **extra) {
    unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
    record(grid, block, shared, stream, 0, function, parameters);
    return 0;
}

static Result handle(void **out, uint64_t value) {
    *out = (void *)value;
    return 0;
}

Result cuInit(unsigned flags) { return 0; }
Result cuDriverGetVersion(int *out) { return *out = 13020, 0; }
Result cuDeviceGet(int *out, int ordinal) { return *out = ordinal, 0; }
Result cuDeviceGetAttribute(int *out, int which, int device) {
    return *out = which == 75 ? 9 : which == 76 ? 0 : 232448, 0;
}
Result cuDevicePrimaryCtxRetain(void **out, int device) { return handle(out, 0xC0); }
Result cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
Result cuCtxGetCurrent(void **out) { return handle(out, 0xC0); }
Result cuCtxSetCurrent(void *context) { return 0; }
Result cuCtxGetDevice(int *out) { return *out = 0, 0; }
Result cuCtxGetLimit(size_t *out, int which) { return *out = 0, 0; }
Result cuCtxSetLimit(int which, size_t value) { return 0; }
Result cuModuleLoadData(void **out, const void *image) { return handle(out, 0xD0); }
Result cuModuleUnload(void *module) { return 0; }
Result cuModuleGetFunction(void **out, void *module, const char *name) { return handle(out, 0xF00D); }
Result cuFuncGetAttribute(int *out, int which, void *function) { return *out = 0, 0; }
Result cuFuncSetAttribute(void *function, int which, int value) { return 0; }
Result cuFuncSetCacheConfig(void *function, int which) { return 0; }
Result cuGetErrorName(int code, const char **out) { return *out = "CUDA_ERROR_FAKE", 0; }
Result cuGetErrorString(int code, const char **out) { return *out = "fake error", 0; }
Result cuPointerGetAttribute(void *out, int which, uint64_t pointer) { return *(uint64_t *)out = pointer, 0; }
Result cuPointerGetAttributes(unsigned n, int *which, void **out, uint64_t pointer) { return 0; }
Result cuStreamIsCapturing(void *stream, int *out) { return *out = 0, 0; }
Result cuOccupancyMaxActiveClusters(int *out, void *function, const Config *c) { return *out = 0, 0; }
