/* The values that aclnn functions take, and the entry points themselves: each counts its calls and jumps to whatever is bound to it.
 * The table of entry points is generated behind this file, one per name in the wheel. x86-64. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { UNBOUND = 561999 };

typedef struct { int64_t rank, shape[16], stride[16], dtype, offset; char *data; } Tensor;
typedef struct { uint64_t count; int64_t at[]; } Integers;
typedef struct { uint64_t count; void *at[]; } Pointers;

void *aclCreateTensor(const int64_t *shape, uint64_t rank, int dtype, const int64_t *stride, int64_t offset, int format,
                      const int64_t *storage_shape, uint64_t storage_rank, void *data) {
    Tensor *t = calloc(1, sizeof *t);
    t->rank = rank;
    memcpy(t->shape, shape, rank * sizeof *shape);
    memcpy(t->stride, stride, rank * sizeof *stride);
    t->dtype = dtype;
    t->offset = offset;
    t->data = data;
    return t;
}

static void *integers(uint64_t count) {
    Integers *made = calloc(1, sizeof *made + count * sizeof(int64_t));
    made->count = count;
    return made;
}

void *aclCreateIntArray(const int64_t *values, uint64_t count) {
    Integers *made = integers(count);
    if (count) memcpy(made->at, values, count * sizeof *values);
    return made;
}
void *aclCreateBoolArray(const char *values, uint64_t count) {
    Integers *made = integers(count);
    for (uint64_t i = 0; i < count; i++) made->at[i] = values[i];
    return made;
}
void *aclCreateFloatArray(const float *values, uint64_t count) {
    Integers *made = integers(count);
    if (count) memcpy(made->at, values, count * sizeof *values);
    return made;
}
void *aclCreateTensorList(void *const *values, uint64_t count) {
    Pointers *made = calloc(1, sizeof *made + count * sizeof(void *));
    made->count = count;
    if (count) memcpy(made->at, values, count * sizeof *values);
    return made;
}
void *aclCreateScalarList(void *const *values, uint64_t count) { return aclCreateTensorList(values, count); }
void *aclCreateScalar(void *value, int dtype) {
    int64_t *made = calloc(4, sizeof *made);
    made[0] = dtype;
    memcpy(made + 1, value, sizeof *made);
    return made;
}

#define DESTROYS(name) long name(void *p) { free(p); return 0; }
DESTROYS(aclDestroyTensor) DESTROYS(aclDestroyScalar) DESTROYS(aclDestroyIntArray) DESTROYS(aclDestroyBoolArray)
DESTROYS(aclDestroyFloatArray)
static long destroy_list(Pointers *list) {
    for (uint64_t i = 0; i < list->count; i++) free(list->at[i]);
    free(list);
    return 0;
}
long aclDestroyTensorList(void *list) { return destroy_list(list); }
long aclDestroyScalarList(void *list) { return destroy_list(list); }

void fattn_message(const char *text);
static long unbound(const char *name) {
    char text[256];
    snprintf(text, sizeof text, "%s is not emulated on the host-memory device", name);
    fattn_message(text);
    return UNBOUND;
}
long fattn_accepts(void) { return 0; }

/* Entry point number `index`: fattn_calls[index] counts, fattn_bound[index] is what runs. Hidden, so that an entry reaches them directly. */
#define HIDDEN __attribute__((visibility("hidden")))
extern HIDDEN uint64_t fattn_calls[];
extern HIDDEN void *fattn_bound[];
uint64_t *fattn_call_counts(void) { return fattn_calls; }
void **fattn_bindings(void) { return fattn_bound; }
#define ENTRY(index, name) \
    static long unbound_##name(void) { return unbound(#name); } \
    __asm__(".globl " #name "\n.type " #name ",@function\n" #name ":\n" \
            "incq fattn_calls+8*" #index "(%rip)\nmovq fattn_bound+8*" #index "(%rip), %r11\njmp *%r11\n");
