/* A CUDA driver without a device, for planning with a real libcudnn: enough that the library loads, describes a device from
   JSON and compiles kernels. Every entry point that is asked for by name exists; those that are not written here say that there
   is no device (CUDA_ERROR_NO_DEVICE). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

enum { SUCCESS = 0, NO_DEVICE = 100, NOT_FOUND = 500, VERSION = 13000 };

static int no_device(void) { return NO_DEVICE; }

int cuInit(unsigned flags) { return NO_DEVICE; }
int cuDriverGetVersion(int *version) { *version = VERSION; return SUCCESS; }
int cuDeviceGetCount(int *count) { *count = 0; return SUCCESS; }
int cuCtxGetCurrent(void **context) { *context = 0; return SUCCESS; }
int cuGetErrorString(int error, const char **text) { *text = "no device"; return SUCCESS; }
int cuGetErrorName(int error, const char **text) { *text = "CUDA_ERROR_NO_DEVICE"; return SUCCESS; }
int cuGetExportTable(const void **table, const void *id) { *table = 0; return NOT_FOUND; }

int cuGetProcAddress_v2(const char *name, void **entry, int version, unsigned long long flags, int *status) {
    void *found = dlsym(RTLD_DEFAULT, name);
    *entry = found ? found : (void *)no_device;
    if (status) *status = 0;
    return SUCCESS;
}
int cuGetProcAddress(const char *name, void **entry, int version, unsigned long long flags) {
    return cuGetProcAddress_v2(name, entry, version, flags, 0);
}

/* what libcudnn looks up by name when it loads its compilers */
#define ABSENT(name) int name(void) { return NO_DEVICE; }
ABSENT(cuCtxGetLimit) ABSENT(cuCtxPopCurrent) ABSENT(cuCtxPushCurrent) ABSENT(cuCtxSetCurrent) ABSENT(cuCtxGetDevice)
ABSENT(cuStreamGetCtx) ABSENT(cuLinkCreate) ABSENT(cuLinkAddData) ABSENT(cuLinkComplete) ABSENT(cuLinkDestroy)
ABSENT(cuLaunchKernel) ABSENT(cuLaunchKernelEx) ABSENT(cuLaunchCooperativeKernel) ABSENT(cuDeviceGet)
ABSENT(cuDeviceGetAttribute) ABSENT(cuLibraryLoadData) ABSENT(cuLibraryLoadFromFile) ABSENT(cuLibraryGetKernel)
ABSENT(cuLibraryUnload) ABSENT(cuKernelSetAttribute) ABSENT(cuKernelGetAttribute) ABSENT(cuOccupancyMaxPotentialClusterSize)
ABSENT(cuTensorMapEncodeIm2col) ABSENT(cuTensorMapEncodeTiled) ABSENT(cuModuleLoadData) ABSENT(cuModuleUnload) ABSENT(cuModuleGetFunction) ABSENT(cuFuncSetAttribute) ABSENT(cuFuncGetAttribute)
