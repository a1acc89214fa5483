/* A libcudnn that plans and runs nothing, for tests without a GPU: the part of the backend API that the binding resolves.

   Descriptors are bags of attributes. Heuristics answer `fake_engine_count` engine configurations (engines 0, 1, 2, ... with
   one knob each); a plan's workspace is `fake_workspace` bytes, its text says which engine it is of; cudnnBackendExecute writes
   down what it was given. The numbers are those of NVIDIA's public cudnn_graph.h. Not thread-safe: the binding holds the GIL. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, BAD_PARAM = 2000, NOT_SUPPORTED = 3000, EXECUTION_FAILED = 5000, CREATE_FAILED = 1001 };
enum { KNOB = 24 }; /* CUDNN_KNOB_TYPE_KERNEL_CFG */
enum { T_BACKEND_DESCRIPTOR = 15 };
enum { ENGINE = 2, ENGINECFG = 3, ENGINEHEUR = 4, PLAN = 5, KNOB_CHOICE = 7, KNOB_INFO = 8, OPERATIONGRAPH = 15, VARIANT_PACK = 16 };
enum {
    HEUR_MODE = 200, HEUR_RESULTS = 202, CFG_ENGINE = 300, CFG_KNOBS = 302, CFG_WORKSPACE = 303, CFG_SHARED_MEMORY = 304, PLAN_CFG = 401, PLAN_WORKSPACE = 402, PLAN_JSON = 405,
    CHOICE_TYPE = 600, CHOICE_VALUE = 601, GRAPH_ENGINES = 802, PACK_UIDS = 1000, PACK_POINTERS = 1001, PACK_WORKSPACE = 1003,
    INFO_TYPE = 1200, INFO_MAX = 1201, INFO_MIN = 1202, INFO_STRIDE = 1203, ENGINE_INDEX = 1301, ENGINE_KNOBS = 1302,
    ENGINE_NUMERICAL = 1303, ENGINE_BEHAVIOR = 1305, CACHE_JSON = 2402, DEVICEPROP_JSON = 2702
};

#ifndef FAKE_VERSION
#define FAKE_VERSION 91900
#endif

/* what tests set */
long fake_version = FAKE_VERSION;
int fake_engine_count = 3;
int fake_heuristics_fail = 0;      /* 1: no engine supports the graph */
long fake_failing_engines = 0;     /* bit e: plans of engine e do not build */
long fake_workspace = 512;
long fake_workspace_of_engine_0 = 0; /* if not 0 */
int fake_native_graph = 1;         /* the behaviour note SUPPORTS_CUDA_GRAPH_NATIVE_API */
int fake_execute_status = SUCCESS;
int fake_create_status = SUCCESS;
/* what tests read */
long fake_executions, fake_plans_built, fake_heuristics_asked, fake_handles, fake_destroyed, fake_set_streams;
long fake_last_count, fake_last_engine;
int64_t fake_last_uids[64];
void *fake_last_pointers[64], *fake_last_workspace, *fake_last_handle, *fake_last_stream, *fake_last_graph;
long fake_pitch, fake_mixed; /* with a pitch: runs whose pointers are not that far apart */
long fake_populated, fake_updated;
char fake_device_json[8192];
char fake_error[1024];
static const char *fake_live_device = "{\"deviceVer\":900,\"multiProcessorCount\":132,\"live\":1}";

typedef struct { int name, type; int64_t count; void *bytes; } Attribute;
typedef struct { int type, finalized, count; Attribute attributes[64]; } Descriptor;
typedef struct { void *stream; } Handle;

static int refuse(int status, const char *text) {
    snprintf(fake_error, sizeof fake_error, "%s", text);
    return status;
}

static size_t size_of(int type) {
    switch (type) {
        case 2: case 24: return 1;
        case 0: case 3: case 5: case 6: case 15: return 8;
        case 26: return 16;
        default: return 4;
    }
}

static Attribute *find(const Descriptor *d, int name) {
    for (int i = 0; i < d->count; i++)
        if (d->attributes[i].name == name) return (Attribute *)&d->attributes[i];
    return NULL;
}

static int put(Descriptor *d, int name, int type, int64_t count, const void *bytes) {
    Attribute *a = find(d, name);
    if (!a) {
        if (d->count == 64) return refuse(BAD_PARAM, "too many attributes");
        a = &d->attributes[d->count++];
        a->bytes = NULL;
    }
    free(a->bytes);
    *a = (Attribute){name, type, count, malloc(count * size_of(type) + 1)};
    memcpy(a->bytes, bytes, count * size_of(type));
    return SUCCESS;
}

static int64_t number(const Descriptor *d, int name, int64_t otherwise) {
    Attribute *a = d ? find(d, name) : NULL;
    if (!a || a->count < 1) return otherwise;
    return size_of(a->type) == 8 ? *(int64_t *)a->bytes : *(int32_t *)a->bytes;
}

static Descriptor *member(const Descriptor *d, int name, int index) {
    Attribute *a = d ? find(d, name) : NULL;
    return a && index < a->count ? ((Descriptor **)a->bytes)[index] : NULL;
}

static int64_t engine_of_plan(const Descriptor *plan) {
    Attribute *text = find(plan, PLAN_JSON);
    const char *at = text ? strstr(text->bytes, "\"engine\":") : NULL;
    return at ? atoll(at + 9) : number(member(member(plan, PLAN_CFG, 0), CFG_ENGINE, 0), ENGINE_INDEX, -1);
}

static int one(int64_t value, int type, int64_t room, int64_t *count, void *out) {
    if (count) *count = 1;
    if (room < 1 || !out) return SUCCESS;
    if (size_of(type) == 8) *(int64_t *)out = value;
    else *(int32_t *)out = (int32_t)value;
    return SUCCESS;
}

size_t cudnnGetVersion(void) { return fake_version; }
const char *cudnnGetErrorString(int status) {
    switch (status) {
        case SUCCESS: return "CUDNN_STATUS_SUCCESS";
        case BAD_PARAM: return "CUDNN_STATUS_BAD_PARAM";
        case NOT_SUPPORTED: return "CUDNN_STATUS_NOT_SUPPORTED";
        case EXECUTION_FAILED: return "CUDNN_STATUS_EXECUTION_FAILED";
        default: return "CUDNN_STATUS_NOT_INITIALIZED";
    }
}
void cudnnGetLastErrorString(char *message, size_t size) {
    snprintf(message, size, "%s", fake_error);
    fake_error[0] = 0;
}
int cudnnCreate(void **handle) {
    if (fake_create_status) return fake_create_status;
    fake_handles++;
    *handle = calloc(1, sizeof(Handle));
    return SUCCESS;
}
int cudnnDestroy(void *handle) {
    fake_destroyed++;
    free(handle);
    return SUCCESS;
}
int cudnnSetStream(void *handle, void *stream) {
    fake_set_streams++;
    ((Handle *)handle)->stream = stream;
    return SUCCESS;
}
int cudnnGetStream(void *handle, void **stream) {
    *stream = ((Handle *)handle)->stream;
    return SUCCESS;
}

int cudnnBackendCreateDescriptor(int type, void **out) {
    Descriptor *d = calloc(1, sizeof(Descriptor));
    d->type = type;
    *out = d;
    return SUCCESS;
}
int cudnnBackendDestroyDescriptor(void *descriptor) { return SUCCESS; } /* others may still name it */
int cudnnBackendSetAttribute(void *descriptor, int name, int type, int64_t count, const void *bytes) {
    if (name == DEVICEPROP_JSON) snprintf(fake_device_json, sizeof fake_device_json, "%.*s", (int)count, (const char *)bytes);
    return put(descriptor, name, type, count, bytes);
}
int cudnnBackendFinalize(void *descriptor) {
    Descriptor *d = descriptor;
    if (d->type == ENGINEHEUR) {
        fake_heuristics_asked++;
        if (fake_heuristics_fail) return refuse(NOT_SUPPORTED, "Reason: no engine of the fake supports the graph");
    }
    if (d->type == ENGINE && number(d, ENGINE_INDEX, 0) >= fake_engine_count) return refuse(BAD_PARAM, "no such engine");
    if (d->type == PLAN) {
        int64_t engine = engine_of_plan(d);
        if (engine >= 0 && engine < 62 && (fake_failing_engines >> engine & 1))
            return refuse(NOT_SUPPORTED, "Reason: the fake's engine does not build");
        fake_plans_built++;
    }
    d->finalized = 1;
    return SUCCESS;
}
int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t room, int64_t *count, void *out) {
    Descriptor *d = descriptor, **slots = out;
    switch (name) {
        case GRAPH_ENGINES: return one(fake_engine_count, type, room, count, out);
        case HEUR_RESULTS: {
            int64_t n = fake_engine_count;
            for (int64_t i = 0; out && i < n && i < room; i++) {
                Descriptor *engine, *choice;
                int64_t value = 20 + i;
                int32_t knob = KNOB;
                cudnnBackendCreateDescriptor(ENGINE, (void **)&engine);
                put(engine, ENGINE_INDEX, 3, 1, &i);
                cudnnBackendCreateDescriptor(KNOB_CHOICE, (void **)&choice);
                put(choice, CHOICE_TYPE, 9, 1, &knob);
                put(choice, CHOICE_VALUE, 3, 1, &value);
                put(slots[i], CFG_ENGINE, T_BACKEND_DESCRIPTOR, 1, &engine);
                put(slots[i], CFG_KNOBS, T_BACKEND_DESCRIPTOR, 1, &choice);
                slots[i]->finalized = 1;
            }
            if (count) *count = room && room < n ? room : n;
            return SUCCESS;
        }
        case ENGINE_BEHAVIOR:
        case ENGINE_NUMERICAL: {
            int native = name == ENGINE_BEHAVIOR && fake_native_graph;
            if (count) *count = native;
            if (native && room > 0 && out) *(int32_t *)out = 3; /* CUDNN_BEHAVIOR_NOTE_SUPPORTS_CUDA_GRAPH_NATIVE_API */
            return SUCCESS;
        }
        case ENGINE_KNOBS:
            if (count) *count = 1;
            if (room > 0 && slots && slots[0]) {
                int64_t low = 20, high = 23, stride = 1;
                int32_t knob = KNOB;
                put(slots[0], INFO_TYPE, 9, 1, &knob);
                put(slots[0], INFO_MIN, 3, 1, &low);
                put(slots[0], INFO_MAX, 3, 1, &high);
                put(slots[0], INFO_STRIDE, 3, 1, &stride);
            }
            return SUCCESS;
        case CFG_SHARED_MEMORY: return one(0, type, room, count, out);
        case CFG_WORKSPACE:
        case PLAN_WORKSPACE: {
            int first = d->type == PLAN && engine_of_plan(d) == 0 && fake_workspace_of_engine_0;
            return one(first ? fake_workspace_of_engine_0 : fake_workspace, type, room, count, out);
        }
        case PLAN_JSON: {
            char text[160];
            int size = snprintf(text, sizeof text, "{\"engine\":%ld,\"version\":%ld}", (long)engine_of_plan(d), fake_version) + 1;
            if (count) *count = size;
            if (room >= size && out) memcpy(out, text, size);
            return SUCCESS;
        }
        case DEVICEPROP_JSON: /* of a device that is here */
        case CACHE_JSON: {
            Attribute *kept = find(d, name);
            const char *text = kept ? kept->bytes : name == CACHE_JSON ? "{\"fake\":[]}" : fake_live_device;
            int64_t size = kept ? kept->count : (int64_t)strlen(text);
            if (count) *count = size;
            if (room >= size && out) memcpy(out, text, size);
            return SUCCESS;
        }
    }
    Attribute *a = find(d, name);
    if (!a) {
        if (count) *count = 0;
        return SUCCESS;
    }
    if (count) *count = a->count;
    int64_t n = a->count < room ? a->count : room;
    if (!out) return SUCCESS;
    if (type == T_BACKEND_DESCRIPTOR && d->type != VARIANT_PACK) { /* the caller's descriptors are filled in */
        Descriptor **kept = a->bytes;
        for (int64_t i = 0; i < n; i++)
            for (int j = 0; j < kept[i]->count; j++) {
                Attribute *from = &kept[i]->attributes[j];
                put(slots[i], from->name, from->type, from->count, from->bytes);
            }
        return SUCCESS;
    }
    memcpy(out, a->bytes, n * size_of(type));
    return SUCCESS;
}

static void record(void *handle, const Descriptor *plan, const Descriptor *pack) {
    Attribute *uids = find(pack, PACK_UIDS), *pointers = find(pack, PACK_POINTERS), *workspace = find(pack, PACK_WORKSPACE);
    fake_last_count = uids ? uids->count : 0;
    if (fake_last_count > 64) fake_last_count = 64;
    if (uids) memcpy(fake_last_uids, uids->bytes, 8 * fake_last_count);
    if (pointers) memcpy(fake_last_pointers, pointers->bytes, 8 * fake_last_count);
    fake_last_workspace = workspace ? *(void **)workspace->bytes : NULL;
    fake_last_handle = handle;
    fake_last_stream = handle ? ((Handle *)handle)->stream : NULL;
    fake_last_engine = engine_of_plan(plan);
    for (int i = 1; fake_pitch && i < fake_last_count; i++)
        if ((char *)fake_last_pointers[i] != (char *)fake_last_pointers[i - 1] + fake_pitch) fake_mixed++;
}
int cudnnBackendExecute(void *handle, void *plan, void *pack) {
    if (fake_execute_status) return refuse(fake_execute_status, "the fake was told to fail");
    fake_executions++;
    record(handle, plan, pack);
    return SUCCESS;
}
int cudnnBackendPopulateCudaGraph(void *handle, void *plan, void *pack, void *graph) {
    fake_populated++;
    fake_last_graph = graph;
    record(handle, plan, pack);
    return SUCCESS;
}
int cudnnBackendUpdateCudaGraph(void *handle, void *plan, void *pack, void *graph) {
    fake_updated++;
    fake_last_graph = graph;
    record(handle, plan, pack);
    return SUCCESS;
}
