/* libcuda and libcudart without a GPU, as far as the binding asks: a context is current, no stream is capturing. */
#include <dlfcn.h>
#include <stddef.h>

int fake_context = 16;

int cuInit(unsigned flags) { return 0; }
int cuCtxGetCurrent(void **context) { *context = &fake_context; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &fake_context; return 0; }
int cuDeviceGetCount(int *count) { *count = 0; return 100; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuStreamGetCtx(void *stream, void **context) { *context = &fake_context; return 0; }
int cuThreadExchangeStreamCaptureMode(int *mode) { return 0; }

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
