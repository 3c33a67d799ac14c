/* One pretend Ascend for the wheel's own C++ layer: its memory is host memory, its default stream runs at once, and every other stream only
 * collects its work, in order. Collected work takes effect where something waits for it: an event that was recorded after it, or a
 * synchronisation of its stream, of the device or by the host. So code that forgets to wait sees the old bytes, each time.
 *
 * The other direction is checked, not imitated: work on a side stream that reads or overwrites what the default stream wrote after that
 * side stream (or the host) last waited for the default stream is an error.
 *
 * This file moves bytes and answers queries. It computes nothing. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FAILED = 507899, TOO_SMALL = 107000, NO_CONTEXT = 107002, RACE = 507900, NOT_READY = 0, COMPLETE = 1 };
enum { COPY, CALL, MARK, WAIT };
enum { HOST_TO_DEVICE = 1, DEVICE_TO_HOST = 2 };

typedef struct Stream Stream;
typedef struct { Stream *on; uint64_t recorded, done, written; int users, queries, destroyed; } Event;
typedef struct Work {
    int kind;
    char *to; const char *from; size_t size;
    long (*call)(void *); void *token;
    Event *event; uint64_t serial;
    struct Work *next;
} Work;
struct Stream { Work *first, **last; Stream *next; uint64_t seen; };

static int device = -1, context;
static int64_t options[64];
static char soc[64] = "Ascend910B1", cann[64] = "9.1.0", message[2048];
static Stream *streams, *default_stream;

/* ---- pinned host memory, to tell it from memory that no asynchronous copy may use ---- */
typedef struct Block { char *at; size_t size; struct Block *next; } Block;
static Block *pinned;

static void *allocate(size_t size) { return aligned_alloc(512, (size + 511) / 512 * 512 + 512); }

static int is_pinned(const char *at) {
    for (Block *b = pinned; b; b = b->next) if (at >= b->at && at < b->at + b->size) return 1;
    return 0;
}

/* ---- what the default stream wrote, newest last, for the check of the other direction ---- */
enum { WRITES = 4096 };
static struct { const char *at; size_t size; } writes[WRITES];
static uint64_t written, host_seen; /* serial numbers: write n is at writes[n % WRITES] */

void fattn_wrote(const void *at, size_t size) {
    if (!size) return;
    writes[written % WRITES].at = at;
    writes[written++ % WRITES].size = size;
}

/* Whether a side stream that works on these bytes would meet a write that it did not wait for; then says so in the message. */
int fattn_races(void *side, const char *at, size_t size) {
    Stream *s = side;
    uint64_t from = s->seen > host_seen ? s->seen : host_seen;
    if (written > WRITES && from < written - WRITES) from = written - WRITES;
    for (uint64_t n = from; n < written; n++) {
        const char *other = writes[n % WRITES].at;
        if (other < at + size && at < other + writes[n % WRITES].size) {
            snprintf(message, sizeof message, "work on a side stream meets bytes that the default stream wrote (%zu at %p), and neither that "
                     "stream nor the host waited for the default stream since: record an event there and wait for it", size, at);
            return 1;
        }
    }
    return 0;
}

/* ---- streams and events ---- */
static void release(Event *e) { if (--e->users == 0 && e->destroyed) free(e); }

static long drain(Stream *s, Event *until, uint64_t serial) {
    long worst = 0;
    while (s->first && !(until && until->done >= serial)) {
        Work *w = s->first;
        long status = 0;
        s->first = w->next;
        if (!s->first) s->last = &s->first;
        if (w->kind == COPY) memcpy(w->to, w->from, w->size);
        else if (w->kind == CALL) status = w->call(w->token);
        else {
            if (w->kind == MARK) w->event->done = w->serial > w->event->done ? w->serial : w->event->done;
            else if (w->event->done < w->serial) status = drain(w->event->on, w->event, w->serial);
            release(w->event);
        }
        worst = worst ? worst : status;
        free(w);
    }
    return worst;
}

static long drain_all(void) {
    long worst = 0;
    for (Stream *s = streams; s; s = s->next) { long status = drain(s, 0, 0); worst = worst ? worst : status; }
    host_seen = written;
    return worst;
}

static int at_once(Stream *s) { return !default_stream || s == default_stream || !s; }

static Work *collect(Stream *s, int kind) {
    Work *w = calloc(1, sizeof *w);
    w->kind = kind;
    *s->last = w;
    s->last = &w->next;
    return w;
}

void fattn_default_stream(void *s) { drain_all(); default_stream = s; }
int fattn_is_side(void *s) { return !at_once(s); }
long fattn_drain(void *s) { return at_once(s) ? 0 : drain(s, 0, 0); }
void fattn_collect(void *s, long (*call)(void *), void *token) { Work *w = collect(s, CALL); w->call = call; w->token = token; }
int fattn_waiting(void) { int n = 0; for (Stream *s = streams; s; s = s->next) for (Work *w = s->first; w; w = w->next) n++; return n; }
void fattn_declare(const char *chip, const char *release) { snprintf(soc, sizeof soc, "%s", chip); snprintf(cann, sizeof cann, "%s", release); }
void fattn_message(const char *text) { snprintf(message, sizeof message, "%s", text); }

static long make_stream(void **made) {
    Stream *s = calloc(1, sizeof *s);
    s->last = &s->first;
    s->next = streams;
    streams = s;
    *made = s;
    return 0;
}

static long make_event(void **made) { *made = calloc(1, sizeof(Event)); return *made ? 0 : FAILED; }

long aclrtCreateStream(void **s) { return make_stream(s); }
long aclrtCreateStreamWithConfig(void **s, uint32_t priority, uint32_t flag) { return make_stream(s); }
/* a destroyed stream first finishes; its record stays, events may still name it */
long aclrtDestroyStream(void *s) { return drain(s, 0, 0); }
long aclrtDestroyStreamForce(void *s) { return drain(s, 0, 0); }
long aclrtSynchronizeStream(void *s) {
    uint64_t seen = at_once(s) ? written : ((Stream *)s)->seen;
    host_seen = seen > host_seen ? seen : host_seen;
    return at_once(s) ? 0 : drain(s, 0, 0);
}
long aclrtSynchronizeStreamWithTimeout(void *s, int32_t timeout) { return aclrtSynchronizeStream(s); }
long aclrtSynchronizeDevice(void) { return drain_all(); }
long aclrtSynchronizeDeviceWithTimeout(int32_t timeout) { return drain_all(); }
long aclrtStreamQuery(void *s, int *status) { *status = at_once(s) || !((Stream *)s)->first ? COMPLETE : NOT_READY; return 0; }

long aclrtCreateEventExWithFlag(void **e, uint32_t flag) { return make_event(e); }
long aclrtCreateEventWithFlag(void **e, uint32_t flag) { return make_event(e); }
long aclrtDestroyEvent(void *p) {
    Event *e = p;
    e->destroyed = 1;
    if (!e->users) free(e);
    return 0;
}
long aclrtRecordEvent(void *p, void *s) {
    Event *e = p;
    e->recorded++;
    e->on = s;
    e->queries = 0;
    e->written = at_once(s) ? written : ((Stream *)s)->seen; /* waits pass on */
    if (at_once(s) || !((Stream *)s)->first) { e->done = e->recorded; return 0; }
    Work *w = collect(s, MARK);
    w->event = e;
    w->serial = e->recorded;
    e->users++;
    return 0;
}
long aclrtResetEvent(void *e, void *s) { return 0; }
long aclrtStreamWaitEvent(void *s, void *p) {
    Event *e = p;
    Stream *waits = s;
    if (!at_once(s) && e->written > waits->seen) waits->seen = e->written;
    if (e->done >= e->recorded) return 0;
    if (at_once(s)) return drain(e->on, e, e->recorded);
    Work *w = collect(s, WAIT);
    w->event = e;
    w->serial = e->recorded;
    e->users++;
    return 0;
}
long aclrtSynchronizeEvent(void *p) {
    Event *e = p;
    if (e->written > host_seen) host_seen = e->written;
    return e->done >= e->recorded ? 0 : drain(e->on, e, e->recorded);
}
/* A loop that polls an event must end: after some polls the device has got on with its work. */
static long polled(Event *e, int *status) {
    if (e->done < e->recorded && ++e->queries > 64) drain(e->on, e, e->recorded);
    *status = e->done >= e->recorded ? COMPLETE : NOT_READY;
    return 0;
}
long aclrtQueryEventStatus(void *e, int *status) { return polled(e, status); }
long aclrtQueryEventWaitStatus(void *e, int *status) { return polled(e, status); }
long aclrtQueryEventRecordedStatus(void *e, int *status) { return polled(e, status); }
long aclrtEventElapsedTime(float *milliseconds, void *from, void *to) { *milliseconds = 0; return 0; }

/* ---- memory ---- */
long aclrtMalloc(void **p, size_t size, int policy) { *p = allocate(size); return *p ? 0 : FAILED; }
long aclrtMallocAlign32(void **p, size_t size, int policy) { return aclrtMalloc(p, size, policy); }
long aclrtMallocHost(void **p, size_t size) {
    if (!(*p = allocate(size))) return FAILED;
    Block *b = malloc(sizeof *b);
    *b = (Block){*p, size, pinned};
    pinned = b;
    return 0;
}
long aclrtMallocHostWithCfg(void **p, uint64_t size, void *configuration) { return aclrtMallocHost(p, size); }
long aclrtFree(void *p) { drain_all(); free(p); return 0; }
long aclrtFreeHost(void *p) {
    drain_all();
    for (Block **b = &pinned; *b; b = &(*b)->next) if ((*b)->at == p) { Block *gone = *b; *b = gone->next; free(gone); break; }
    free(p);
    return 0;
}
long aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) {
    if (size > room) return TOO_SMALL;
    memcpy(to, from, size);
    return 0;
}
long aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, void *s) {
    if (size > room) return TOO_SMALL;
    if (!at_once(s) && (fattn_races(s, from, size) || fattn_races(s, to, size))) return RACE;
    const char *host = kind == HOST_TO_DEVICE ? from : kind == DEVICE_TO_HOST ? to : 0;
    if (at_once(s) || (host && !is_pinned(host))) { /* the copy of memory that is not pinned is a synchronous one */
        long status = at_once(s) ? 0 : drain(s, 0, 0);
        memcpy(to, from, size);
        if (at_once(s) && kind != DEVICE_TO_HOST) fattn_wrote(to, size);
        return status;
    }
    Work *w = collect(s, COPY);
    w->to = to;
    w->from = from;
    w->size = size;
    return 0;
}
long aclrtMemset(void *p, size_t room, int value, size_t size) { memset(p, value, size); return 0; }
long aclrtMemsetAsync(void *p, size_t room, int value, size_t size, void *s) {
    if (!at_once(s)) drain(s, 0, 0);
    memset(p, value, size);
    return 0;
}
long aclrtGetMemInfo(int kind, size_t *unused, size_t *total) { *unused = *total = 8ull << 30; return 0; }

/* ---- the device and its software ---- */
long aclrtGetDeviceCount(uint32_t *count) { *count = 1; return 0; }
long aclrtSetDevice(int chosen) { device = chosen; return 0; }
long aclrtGetDevice(int *chosen) { if (device < 0) return NO_CONTEXT; *chosen = device; return 0; }
long aclrtResetDevice(int chosen) { return drain_all(); }
const char *aclrtGetSocName(void) { return soc; }
const char *aclGetRecentErrMsg(void) { /* once */
    static char told[sizeof message];
    if (!message[0]) return NULL;
    strcpy(told, message);
    message[0] = 0;
    return told;
}
long aclrtGetCurrentContext(void **current) { *current = &context; return 0; }
long aclrtGetDeviceCapability(int chosen, int kind, long *value) { *value = 0; return 0; }
long aclGetCompileoptSize(int option) { return 16; }
long aclGetCompileopt(int option, char *value, size_t size) { strncpy(value, "disable", size); return 0; }
static long option(int which, int64_t *value) { *value = options[which & 63]; return 0; }
static long set_option(int which, int64_t value) { options[which & 63] = value; return 0; }
long aclrtGetSysParamOpt(int which, int64_t *value) { return option(which, value); }
long aclrtSetSysParamOpt(int which, int64_t value) { return set_option(which, value); }
long aclrtCtxGetSysParamOpt(int which, int64_t *value) { return option(which, value); }
long aclrtCtxSetSysParamOpt(int which, int64_t value) { return set_option(which, value); }
long aclsysGetVersionStr(char *package, char *out) { strcpy(out, cann); return 0; }
long aclsysGetCANNVersion(int package, char *out) { memset(out, 0, 128); strcpy(out, cann); return 0; }

#define SUCCEEDS(name) long name(void) { return 0; }
SUCCEEDS(aclInit) SUCCEEDS(aclFinalize) SUCCEEDS(aclAppLog) SUCCEEDS(aclSetCompileopt)
SUCCEEDS(aclmdlInitDump) SUCCEEDS(aclmdlFinalizeDump) SUCCEEDS(aclmdlSetDump)
SUCCEEDS(aclrtSetCurrentContext) SUCCEEDS(aclrtProcessReport)
SUCCEEDS(aclrtSetDeviceSatMode) SUCCEEDS(aclrtSetOpExecuteTimeOut)
SUCCEEDS(MsprofRegisterCallback) SUCCEEDS(HcclSetConfig) SUCCEEDS(aclDestroyAclOpExecutor)
