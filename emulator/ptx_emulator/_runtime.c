/* The host runtime that a compiled CuTe DSL host function links against, in place of the vendor's.
 *
 * Contract: no driver, no device. Kernels are (image, name) pairs; a launch calls back into Python with what the host
 * function gave; device attributes are those of the table that Python set. Every function returns a cudaError_t: 0, or
 * 1 (invalid value) with a message that ptxemu_problem() returns. Signatures follow the CUDA Runtime and Driver API of
 * the same names without the leading underscore; those that only functions compiled for TVM-FFI need are at the end.
 * Built once by _runtime.py; used by _host_call.py, in the child only.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2 };
enum { FUNC_MAX_DYNAMIC_SHARED = 8 };      /* cudaFuncAttributeMaxDynamicSharedMemorySize, CU_FUNC_ATTRIBUTE_... */
enum { KERNEL_MAX_THREADS = 0 };           /* CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK */
enum { DEVICE_THREADS_PER_BLOCK = 1, DEVICE_SHARED_PER_BLOCK = 8 };

typedef struct { unsigned x, y, z; } Extent;                        /* dim3 */
typedef struct { int id; int pad; unsigned char value[64]; } Attribute; /* cudaLaunchAttribute, 72 bytes */
typedef struct { Extent grid, block; size_t dynamic_shared; void *stream; Attribute *attributes; unsigned count; } Config;
typedef struct { const void *image; } Library;
typedef struct { const void *image; int max_dynamic; char name[]; } Kernel;

typedef int (*OnLaunch)(const char *kernel, const void *image, int max_dynamic, const Config *config, void **arguments);

static OnLaunch on_launch;
static const int *device_attributes; /* pairs: attribute, value */
static int device_attribute_count;
static char problem[4096];
static int raised; /* the cudaError_t that a TVM-FFI function reported */

void ptxemu_configure(OnLaunch callback, const int *attributes, int count) {
    on_launch = callback;
    device_attributes = attributes;
    device_attribute_count = count;
    problem[0] = 0;
    raised = 0;
}

const char *ptxemu_problem(void) { return problem; }

int ptxemu_raised(void) { return raised; }

static int invalid(const char *what, long long a, long long b) {
    snprintf(problem, sizeof problem, "%s (%lld, %lld)", what, a, b);
    return INVALID_VALUE;
}

static int device_attribute(int *value, int attribute) {
    for (int i = 0; i < device_attribute_count; i++)
        if (device_attributes[2 * i] == attribute) {
            *value = device_attributes[2 * i + 1];
            return SUCCESS;
        }
    return invalid("the host function asks for a device attribute that the emulator does not know: attribute, device", attribute, 0);
}

int _cudaLibraryLoadData(void **library, const void *code, void *jit_options, void *jit_values, unsigned jit_count,
                         void *options, void *values, unsigned count) {
    (void)jit_options, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    Library *made = malloc(sizeof *made);
    if (!made) return OUT_OF_MEMORY;
    made->image = code;
    *library = made;
    return SUCCESS;
}

int _cudaLibraryUnload(void *library) {
    free(library);
    return SUCCESS;
}

int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
    size_t length = strlen(name) + 1;
    Kernel *made = malloc(sizeof *made + length);
    if (!made) return OUT_OF_MEMORY;
    made->image = ((Library *)library)->image;
    if (device_attribute(&made->max_dynamic, DEVICE_SHARED_PER_BLOCK)) made->max_dynamic = 49152;
    memcpy(made->name, name, length);
    *kernel = made;
    return SUCCESS;
}

static int set_attribute(Kernel *kernel, int attribute, int value) {
    if (attribute == FUNC_MAX_DYNAMIC_SHARED) {
        if (value < 0) return invalid("maximum dynamic shared memory: attribute, bytes", attribute, value);
        kernel->max_dynamic = value;
    }
    return SUCCESS; /* the others (carve-out, cluster permission) do not change what a launch computes */
}

int _cudaFuncSetAttribute(void *kernel, int attribute, int value) { return set_attribute(kernel, attribute, value); }

int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
    return device ? invalid("no such device: device, attribute", device, attribute) : set_attribute(kernel, attribute, value);
}

int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
    (void)device;
    if (attribute == FUNC_MAX_DYNAMIC_SHARED) {
        *value = ((Kernel *)kernel)->max_dynamic;
        return SUCCESS;
    }
    if (attribute == KERNEL_MAX_THREADS) return device_attribute(value, DEVICE_THREADS_PER_BLOCK);
    if (attribute > KERNEL_MAX_THREADS && attribute < FUNC_MAX_DYNAMIC_SHARED) { /* static sizes and versions */
        *value = 0;
        return SUCCESS;
    }
    return invalid("the host function asks for a kernel attribute that the emulator does not know: attribute, device", attribute, device);
}

int _cudaGetDevice(int *device) {
    *device = 0;
    return SUCCESS;
}

int _cudaGetDeviceCount(int *count) {
    *count = 1;
    return SUCCESS;
}

int _cudaSetDevice(int device) { return device ? invalid("no such device: device", device, 0) : SUCCESS; }

int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
    return device ? invalid("no such device: device, attribute", device, attribute) : device_attribute(value, attribute);
}

int _cudaDeviceSynchronize(void) { return SUCCESS; }

int _cudaStreamSynchronize(void *stream) {
    (void)stream;
    return SUCCESS;
}

int _cudaLaunchKernelEx(const Config *config, void *kernel, void **arguments) {
    const Kernel *launched = kernel;
    if (!on_launch) return invalid("launch before the runtime was configured", 0, 0);
    return on_launch(launched->name, launched->image, launched->max_dynamic, config, arguments);
}

/* cuTensorMapEncodeTiled, whose parameters these are. The layout of a map is that of `_tensor_map.py`; limits are checked when
 * a kernel uses the map. */
int _cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const uint64_t *extents, const uint64_t *strides,
                            const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int l2, int fill) {
    static const unsigned char codes[] = {0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 8, 7, 8, 11, 12, 13}; /* by CUtensorMapDataType */
    static const unsigned char patterns[] = {0, 1, 2, 3, 3, 3, 3}, atoms[] = {0, 0, 0, 0, 1, 2, 3}; /* by CUtensorMapSwizzle */
    if (type < 0 || type > 15 || rank < 1 || rank > 5 || swizzle < 0 || swizzle > 6)
        return invalid("tensor map of an unknown type, rank or swizzle: type, rank", type, rank);
    uint32_t word[32] = {0};
    word[0] = (uint32_t)(uintptr_t)address;
    word[1] = (uint32_t)((uint64_t)(uintptr_t)address >> 32);
    word[2] = (rank - 1) << 4 | (uint32_t)codes[type] << 7 | (uint32_t)interleave << 11 | (uint32_t)patterns[swizzle] << 13 |
              (uint32_t)fill << 15 | (uint32_t)(type == 11 || type == 12) << 16 | (uint32_t)l2 << 17 | (uint32_t)atoms[swizzle] << 19;
    for (unsigned i = 0; i < rank; i++) {
        if (i + 1 < rank) {
            word[3 + i] = (uint32_t)(strides[i] >> 4);
            word[7] |= (uint32_t)(strides[i] >> 36 & 15) << 4 * i;
        }
        word[8 + i] = (uint32_t)(extents[i] - 1);
        word[13] |= (steps[i] - 1) << 3 * i;
        if (i) word[14] |= (box[i] - 1) << 8 * (i - 1);
    }
    word[13] |= (box[0] - 1) << 24;
    memcpy(map, word, sizeof word);
    return SUCCESS;
}

void cuda_dialect_assert_success(int error) {
    if (!error) return;
    fprintf(stderr, "the host function stops: error %d; %s\n", error, problem);
    abort();
}

/* --- TVM-FFI: errors and the stream of the environment as in tvm/ffi/c_api.h and extra/c_env_api.h of apache-tvm-ffi; the
 * others have the parameters that objects of CuTe DSL 4.8 give them. They return -1 for "an error has been raised". */
void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int count) {
    size_t used = (size_t)snprintf(problem, sizeof problem, "%s: ", kind);
    for (int i = 0; i < count && used < sizeof problem; i++)
        if (parts[i]) used += (size_t)snprintf(problem + used, sizeof problem - used, "%s", parts[i]);
}

void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message) {
    TVMFFIErrorSetRaisedFromCStrParts(kind, &message, 1);
}

void *TVMFFIEnvGetStream(int device_type, int device) {
    (void)device_type, (void)device;
    return NULL;
}

/* What the runtime said of the error stays in `problem`, so `set` is not called. */
void CuteDSLRT_TVMFFISetRaisedCudaError(void *set, int error) {
    (void)set;
    raised = error;
}

int cuda_dialect_init_library_once(void **state, int (*init)(void **), int (*load)(void **, int), void *set) {
    void *library = NULL;
    (void)set;
    if (*state) return 0;
    raised = init(&library);
    if (!raised) raised = load(&library, 0);
    if (raised) return -1;
    *state = library;
    return 0;
}

void cuda_dialect_unload_library_once(void **state) {
    if (*state) _cudaLibraryUnload(*state);
    *state = NULL;
}
