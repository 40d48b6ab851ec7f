/* The part of the CUDA driver that a compiled launcher asks for. It is linked into the launcher's shared object with
 * -Bsymbolic, hides from all others, and passes every launch on to the emulator. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define HIDDEN __attribute__((visibility("hidden")))
#define MAX_KERNELS 16

static void (*sink)(const char* kernel, const void* config, void** arguments);
static char names[MAX_KERNELS][1024];
static int named;

void mla_emulator_sink(void (*function)(const char*, const void*, void**)) { sink = function; }

HIDDEN int _cudaGetDevice(int* device) {
    *device = 0;
    return 0;
}
HIDDEN int _cudaSetDevice(int device) { return device != 0; }
HIDDEN int _cudaDeviceGetAttribute(int* value, int attribute, int device) {
    (void)attribute, (void)device;
    *value = 232448;
    return 0;
}
HIDDEN int _cuKernelGetAttribute(int* value, int attribute, void* kernel, int device) {
    (void)attribute, (void)kernel, (void)device;
    *value = 0;
    return 0;
}
HIDDEN int _cudaFuncSetAttribute(void* function, int attribute, int value) {
    (void)function, (void)attribute, (void)value;
    return 0;
}
HIDDEN int _cudaKernelSetAttributeForDevice(void* kernel, int attribute, int value, int device) {
    (void)kernel, (void)attribute, (void)value, (void)device;
    return 0;
}
HIDDEN int _cudaLibraryLoadData(void** library, const void* code, void* a, void* b, unsigned c, void* d, void* e,
                                unsigned f) {
    (void)code, (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
    *library = names;
    return 0;
}
HIDDEN int _cudaLibraryGetKernel(void** kernel, void* library, const char* name) {
    (void)library;
    for (int i = 0; i < named; i++)
        if (!strcmp(names[i], name)) {
            *kernel = names[i];
            return 0;
        }
    if (named == MAX_KERNELS || strlen(name) >= sizeof names[0]) return 1;
    strcpy(names[named], name);
    *kernel = names[named++];
    return 0;
}
HIDDEN int _cudaLaunchKernelEx(const void* config, void* kernel, void** arguments) {
    if (!sink) return 1;
    sink(kernel, config, arguments);
    return 0;
}
HIDDEN int cuda_dialect_init_library_once(void** handle, int (*load)(void**), int (*setup)(void**)) {
    void* library = NULL;
    int status = *handle ? 0 : load(&library);
    if (*handle || status) return status;
    *handle = library;
    return setup(&library);
}
HIDDEN int cuda_dialect_unload_library_once(void** handle) {
    (void)handle;
    return 0;
}
HIDDEN void CuteDSLRT_TVMFFISetRaisedCudaError(int status) { (void)status; }
