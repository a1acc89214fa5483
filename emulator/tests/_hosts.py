"""Host objects like those of CuTe DSL's export_to_c, written in C, and PTX for them: loaded by tests with runpy.

A CuTe DSL is not needed: the ABI is `_mlir_<prefix>_cuda_init`, `_mlir_<prefix>_cuda_load_to_device` and
`_mlir_<prefix>__mlir_ciface_<name>(void **arguments, int32_t count)`, whose last argument receives the error.
"""

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

has_compiler = any(map(shutil.which, ("cc", "gcc", "clang")))
needs_compiler = pytest.mark.skipif(not has_compiler, reason="needs a C compiler: launch builds its host runtime")

HOST = r"""
#include <stdint.h>
#include <stddef.h>
#include <unistd.h>
typedef struct { unsigned x, y, z; } dim;
typedef struct { int id, pad; unsigned value[16]; } attribute;
typedef struct { dim grid, block; size_t dynamic; void *stream; attribute *attributes; unsigned count; } config;
extern int _cudaLibraryLoadData(void **, const void *, void *, void *, unsigned, void *, void *, unsigned);
extern int _cudaLibraryGetKernel(void **, void *, const char *);
extern int _cudaLaunchKernelEx(const config *, void *, void **);
extern int _cudaFuncSetAttribute(void *, int, int);
extern int _cudaDeviceGetAttribute(int *, int, int);
extern int _cudaLibraryUnheardOf(void);
static const unsigned char image[64] = "no cubin";
static void *library, *kernel;
void _mlir_t_cuda_init(void **a) { *(int *)a[1] = _cudaLibraryLoadData(*(void ***)a[0], image, 0, 0, 0, 0, 0, 0); }
void _mlir_t_cuda_load_to_device(void **a) {
    library = **(void ***)a[0];
    *(int *)a[2] = _cudaLibraryGetKernel(&kernel, library, "KERNEL");
}
static int run(dim grid, dim block, dim cluster, size_t dynamic, void **parameters) {
    attribute attributes[2] = {{6, 0, {PROGRAMMATIC}}, {4, 0, {cluster.x, cluster.y, cluster.z}}};
    config c = {grid, block, dynamic, 0, attributes, 2};
    return _cudaLaunchKernelEx(&c, kernel, parameters);
}
void _mlir_t__mlir_ciface_host(void **a, int32_t count) {
    int *result = a[count - 1];
    BODY
}
"""

# A TVM-FFI function `k`: int32_t (void *self, TVMFFIAny *args, int32_t count, TVMFFIAny *result)
FFI = r"""
typedef struct { int32_t type; uint32_t zero; union { int64_t i; double f; void *p; } v; } any;
typedef struct { void *data; int32_t device[2], rank; uint8_t code, bits; uint16_t lanes; int64_t *shape, *strides; uint64_t at; } tensor;
typedef struct { uint64_t references; int32_t type; uint32_t zero; void *deleter; any *items; int64_t size; } array;
extern int cuda_dialect_init_library_once(void **, int (*)(void **), int (*)(void **, int), void (*)(const char *, const char *));
extern void TVMFFIErrorSetRaisedFromCStr(const char *, const char *);
extern void TVMFFIErrorSetRaisedFromCStrParts(const char *, const char **, int32_t);
extern void CuteDSLRT_TVMFFISetRaisedCudaError(void *, int32_t);
static void *state;
static int init(void **made) { return _cudaLibraryLoadData(made, image, 0, 0, 0, 0, 0, 0); }
static int load(void **made, int device) { return _cudaLibraryGetKernel(&kernel, *made, "KERNEL"); }
static int refuse(const char *kind, const char *a, const char *b) {
    const char *parts[] = {a, 0, b};
    TVMFFIErrorSetRaisedFromCStrParts(kind, parts, 3);
    return -1;
}
int32_t __tvm_ffi_k(void *self, any *a, int32_t count, any *result) {
    if (cuda_dialect_init_library_once(&state, init, load, TVMFFIErrorSetRaisedFromCStr)) return -1;
    BODY
}
"""

# struct { void *data; int32_t n } for x and y as the descriptors of two tensors
ADD_BODY = """
    struct { float *data; int32_t n; } *x = a[0], *y = a[1];
    dim one = {1, 1, 1}, block = {32, 1, 1}, grid = {(x->n + 31) / 32, 1, 1};
    void *parameters[] = {&x->data, &y->data, a[2], &x->n};
    *result = run(grid, block, one, 0, parameters);
"""

# y[i] += x[i] * scale
AXPY = """.version 8.8
.target {target}
.address_size 64
.visible .entry axpy(.param .u64 x, .param .u64 y, .param .f32 scale, .param .u32 n)
{{
 .reg .pred %p<2>; .reg .b32 %r<6>; .reg .f32 %f<5>; .reg .b64 %rd<9>;
 ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; ld.param.f32 %f1, [scale]; ld.param.u32 %r1, [n];
 mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x; mad.lo.s32 %r5, %r2, %r3, %r4;
 setp.ge.s32 %p1, %r5, %r1;
 @%p1 bra DONE;
 mul.wide.s32 %rd5, %r5, 4; add.s64 %rd6, %rd1, %rd5; ld.global.f32 %f2, [%rd6];
 add.s64 %rd7, %rd2, %rd5; ld.global.f32 %f3, [%rd7]; fma.rn.f32 %f4, %f2, %f1, %f3; st.global.f32 [%rd7], %f4;
DONE: ret;
}}
"""


def axpy(target="sm_100a"):
    return AXPY.format(target=target)


def host_object(body=ADD_BODY, kernel="axpy", ffi=False, programmatic=0):
    """A compiled host object whose function `host` runs `body`; `ffi`: whose TVM-FFI function `k` does. `programmatic` is the
    value of the attribute of programmatic stream serialization, or a C expression of `parameters`."""
    text = HOST
    if ffi:
        text = (
            text[: text.index("void _mlir_t_cuda_init")]
            + text[text.index("static int run") : text.index("void _mlir_t__")]
            + FFI
        )
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "host.c", Path(folder) / "host.o"
        source.write_text(
            text.replace("PROGRAMMATIC", str(programmatic)).replace("KERNEL", kernel).replace("BODY", body)
        )
        command = next(filter(shutil.which, ("cc", "gcc", "clang")))
        subprocess.run([command, "-O1", "-fPIC", "-w", "-c", "-o", str(made), str(source)], check=True)
        return made.read_bytes()
