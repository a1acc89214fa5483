/* libcuda and libcudart without a GPU, as far as the binding asks: a context is current, no stream is capturing. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

int fake_context = 16;

int cuInit(unsigned flags) { return 0; }
int cuCtxGetCurrent(void **context) { *context = &fake_context; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &fake_context; return 0; }
int cuDeviceGetCount(int *count) { *count = 0; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuStreamGetCtx(void *stream, void **context) { *context = &fake_context; return 0; }
int cuThreadExchangeStreamCaptureMode(int *mode) { return 0; }

/* fills: what each was asked for, and how many runs of the fake libcudnn came before */
typedef struct { uint64_t pointer, pitch, value, bits, width, height, stream, executions; } Fill;
long fake_fills;
Fill fake_filled[16];
int fake_fill_status, fake_fill_fails_once; /* the answer to fills; only to the next of them */
static int fill(uint64_t pointer, size_t pitch, unsigned value, int bits, size_t width, size_t height, void *stream) {
    void *cudnn = dlopen("libcudnn.so.9", RTLD_LAZY | RTLD_NOLOAD);
    long *executions = cudnn ? dlsym(cudnn, "fake_executions") : NULL;
    int status = fake_fill_status;
    if (fake_fill_fails_once) fake_fill_status = fake_fill_fails_once = 0;
    if (status) return status;
    fake_filled[fake_fills++ % 16] =
        (Fill){pointer, pitch, value, bits, width, height, (uintptr_t)stream, executions ? *executions : -1};
    return 0;
}
int cuMemsetD8Async(uint64_t p, unsigned char v, size_t n, void *s) { return fill(p, 0, v, 8, n, 1, s); }
int cuMemsetD32Async(uint64_t p, unsigned v, size_t n, void *s) { return fill(p, 0, v, 32, n, 1, s); }
int cuMemsetD2D8Async(uint64_t p, size_t pitch, unsigned char v, size_t w, size_t h, void *s) { return fill(p, pitch, v, 8, w, h, s); }
int cuMemsetD2D32Async(uint64_t p, size_t pitch, unsigned v, size_t w, size_t h, void *s) { return fill(p, pitch, v, 32, w, h, s); }
int cuCtxPushCurrent(void *context) { return 0; }
int cuCtxPopCurrent(void **context) { *context = &fake_context; return 0; }

/* how cuda-bindings finds the functions of this file; it may have been loaded for itself alone */
int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status) {
    Dl_info here;
    void *self = dladdr(&fake_context, &here) ? dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    *found = self ? dlsym(self, name) : NULL;
    if (status) *status = *found ? 0 : 1;
    return *found ? 0 : 500;
}

int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaGetLastError(void) { return 0; }
const char *cudaGetErrorString(int status) { return "an error of the fake"; }
int cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }
int cudaDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return 0; }
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cudaStreamGetCaptureInfo_v2(void *stream, int *status, void *id, void *graph, void *nodes, void *count) { *status = 0; return 0; }
int cudaStreamGetCaptureInfo(void *stream, int *status, void *id, void *graph, void *nodes, void *edges, void *count) { *status = 0; return 0; }
int cudaThreadExchangeStreamCaptureMode(int *mode) { return 0; }
int cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, unsigned long long flags, void *result) {
    *found = dlsym(RTLD_DEFAULT, name);
    return *found ? 0 : 500;
}
/* native CUDA graphs: an empty graph gets one child */
static char child, node;
int cudaGraphCreate(void **graph, unsigned flags) { *graph = &child; return 0; }
int cudaGraphDestroy(void *graph) { return 0; }
int cudaGraphAddChildGraphNode(void **out, void *graph, void *dependencies, size_t count, void *inner) { *out = &node; return 0; }
int cudaGraphGetRootNodes(void *graph, void **nodes, size_t *count) { *count = 1; if (nodes) nodes[0] = &node; return 0; }
int cudaGraphGetNodes(void *graph, void **nodes, size_t *count) { *count = 0; return 0; }
int cudaGraphChildGraphNodeGetGraph(void *of, void **graph) { *graph = &child; return 0; }
int cudaGraphNodeGetDependentNodes(void *of, void **nodes, void *edges, size_t *count) { *count = 0; return 0; }
